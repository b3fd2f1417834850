"""minidflash: DFlash built up from everything that leads to it, one room per idea.

The floor plan. A room uses only rooms with lower numbers; nothing is re-exported.

    01 attention         RMSNorm, rotary positions, grouped-query attention under a mask, SwiGLU
    02 qwen3             the target: a readable Qwen3 decoder that shows its hidden states
    03 greedy            plain decoding without a cache: the oracle of every later room
    04 cache             keys and values: append, truncate; cached equals uncached
    05 masked_diffusion  LLaDA: mask, predict, the 1/t loss, low-confidence sampling
    06 block_diffusion   BD3-LM: diffusion inside blocks, autoregression between them
    07 verify            what survives of a draft
    08 speculate         the one draft-and-verify loop, for any drafter
    09 eagle             autoregressive drafting on the target's features
    10 tree              EAGLE-2's draft tree and its verification
    11 features          which target layers are tapped, and how they are fused
    12 drafter           DFlash's draft model: features as extra keys and values in every layer
    13 anchors           random anchors, packed blocks, who may look at whom in training
    14 loss              the position-weighted cross-entropy
    15 train             the training loop
    16 dflash            DFlash decoding: the drafter in the loop, both caches in step
    17 kernel            fused attention in Triton, checked against the readable version
    18 measure           acceptance length, the cost model, honest timing

Around the rooms stands ``minidflash.kit``: models, text, training recipes, pictures, the course's
machinery. No room imports it.
"""
