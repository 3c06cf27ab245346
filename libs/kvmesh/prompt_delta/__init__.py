"""Prompt deltas: a prompt is sent as the part that its receiver has not stored yet. Pure.

The protocol has three forms: `tokens` (frontend to worker), `hashes` (frontend to router, router to
indexer) and `blocks` (worker to kvbm). A message names a `base`, an earlier prompt that the
receiver has stored, and how much of it is `shared`, followed by the rest of the prompt. A receiver
that has evicted the base replies "incomplete" and does nothing else; the sender forgets the base
and sends the whole prompt. Both sides are caches bounded by size, so neither tracks the other's
evictions.
"""
