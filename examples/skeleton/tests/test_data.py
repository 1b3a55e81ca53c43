"""The data: three parts of the patients, in a new order each epoch."""

import torch

from examples.skeleton.data import SkeletonData


def test_parts_share_no_patient_and_training_data_are_shuffled():
    data = SkeletonData(global_batch_size=100, seed=0)
    data.setup("fit")
    parts = [part.tensors[0] for part in (data.train, data.val, data.test)]
    assert [len(x) for x in parts] == [300, 71, 71]
    assert len(torch.cat(parts).unique(dim=0)) == 442
    loader = data.train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.start_at(epoch, 0)
        epochs.append(torch.cat([x for x, _ in loader]))
    assert not torch.equal(*epochs)
    assert torch.equal(*(epoch.sort(dim=0).values for epoch in epochs))
