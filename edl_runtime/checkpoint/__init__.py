"""Checkpoints of a training's state, a `file_format.Snapshot`.

`store.CheckpointStore` writes, lists, loads and prunes them in one folder, `writer.CheckpointWriter` writes in the
background of a training.
"""
