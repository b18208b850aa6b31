"""Checkpoints: the state of a training, stored, so that its instances may come and go.

`store.CheckpointStore` writes, finds, loads and prunes them in one folder, `writer.CheckpointWriter` writes in the
background of a running training. A `file_format.Snapshot` is what goes in and comes out.
"""
