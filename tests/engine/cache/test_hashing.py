from engine.cache import block_hash, hash_chain, root_hash


def test_a_chain_covers_full_blocks_only():
    root = root_hash("weights", "tenant")
    first = block_hash(root, [1, 2, 3, 4])
    second = block_hash(first, [5, 6, 7, 8])
    assert hash_chain(root, [1, 2, 3, 4, 5, 6, 7, 8, 9], 4) == [first, second]
    assert hash_chain(root, [1, 2, 3], 4) == []


def test_the_same_block_hashes_differently_after_another_prefix():
    root = root_hash("weights", "tenant")
    assert hash_chain(root, [1, 2, 9, 9], 2)[1] != hash_chain(root, [1, 3, 9, 9], 2)[1]


def test_lists_and_tuples_of_tokens_hash_alike():
    root = root_hash("weights", "tenant")
    assert hash_chain(root, [1, 2, 3, 4], 2) == hash_chain(root, (1, 2, 3, 4), 2)


def test_hashes_are_the_same_on_every_node():
    """Pinned: nodes of different versions exchange KV by these hashes."""
    root = root_hash("fp", "t")
    assert root.hex() == "be94f4aff4cd8ec3aeba8d894545a237de95b9cf9c8774257a8e2b1bdbbf4a45"
    assert (
        block_hash(root, [1, 2]).hex()
        == "a2e96684682278d8963ae91e7daffe2a5de1038830e5add8b632df6429a9eb0a"
    )


def test_fingerprint_and_salt_cannot_pass_for_each_other():
    roots = {
        root_hash("a", "b"),
        root_hash("b", "a"),
        root_hash("ab", ""),
        root_hash("", "ab"),
        root_hash("a\x04saltb", ""),
    }
    assert len(roots) == 5
