"""The engine: model files, tokenizer, block pool, KV memory, models, sampler and the model runner.

`block_pool`, `batch`, `model_files` and `tokenizer` import no torch: the coordinator and the schedulers use them.
"""
