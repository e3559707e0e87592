"""One engine over several processes: a coordinator that plans, and ranks that compute.

```
engine (scheduler, text)          rank 0   rank 1   ...         each: a shard of weights and KV
   └─ RankExecutor ── StepPlan ──►  ✓        ✓                  Unix socket or TCP, one frame a step
                   ◄── tokens ───   ✓  (sampling rank)          every rank answers every step
                                    └─ torch.distributed ─┘     sums within a layer, hidden states
                                                                from stage to stage
```

Every rank derives its tensors from the plan. Logits are gathered on the first rank of the last
stage, which samples: the next plan carries the token to all. Noise is stateless, so which rank
draws it changes nothing.

With several stages a plan for each may be under way, over streams of its own and the parts of
prompts: a stage takes the next one up while the stages behind it compute the last. A plan that is
alone is cut into micro-batches instead.
"""
