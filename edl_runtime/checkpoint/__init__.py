"""Checkpoints: what a training is carried by when its trainers come and go.

`store.CheckpointStore` writes, finds, loads and prunes them at one place, `writer.CheckpointWriter` writes beside a
running training, `schedule.Schedule` tells when. A `snapshot.Snapshot` is what goes in and comes out.
"""
