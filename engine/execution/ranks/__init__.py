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
"""
