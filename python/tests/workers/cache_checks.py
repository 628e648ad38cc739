"""Checks of KVCache on a group of processes."""

import torch
import torch.distributed as dist
from common import check, close, raises, shard, whole


def generate(cache, q, k, v, prompt, sharded, **options):
    """Results of a prompt's last row and of every row after it, one at a time."""
    if sharded:
        cache.append(shard(k[:, :prompt], "striped"), shard(v[:, :prompt], "striped"), sharded=True)
    else:
        cache.append(k[:, :prompt], v[:, :prompt])
    found = [cache.attention(q[:, prompt - 1 : prompt], is_causal=True, **options)]
    for row in range(prompt, q.size(1)):
        cache.append(k[:, row : row + 1], v[:, row : row + 1])
        assert len(cache) == row + 1
        found.append(cache.attention(q[:, row : row + 1], is_causal=True, **options))
    return torch.cat(found, 1)


@check
def a_striped_cache_appends_and_knows_patterns_windows_and_several_rows():
    import ringattn

    group = dist.group.WORLD
    q, k, v, _ = whole(seq_k=21)
    dilated = {"segment_lengths": [8, 0], "dilation_rates": [1, 2], "combine": "mix", "dilate_queries": False}
    for options in ({}, {"window": (4, 0)}, dilated):
        expected = ringattn.attention(q, k, v, is_causal=True, **options)
        for sharded in (False, True):
            for capacity in (None, 21, 40):
                found = generate(ringattn.KVCache(group, capacity=capacity), q, k, v, 9, sharded, **options)
                close(found, expected[:, 8:])
    cache = ringattn.KVCache(group)
    for begin, end in ((0, 1), (1, 7), (7, 7), (7, 21)):
        cache.append(k[:, begin:end], v[:, begin:end])
    close(cache.attention(q[:, 7:], is_causal=True), ringattn.attention(q, k, v, is_causal=True)[:, 7:])
    assert cache.key.size(1) == len(range(dist.get_rank(), 21, dist.get_world_size())) and cache.key_range is None


@check
def other_layouts_have_a_capacity_and_a_key_range():
    import ringattn

    group = dist.group.WORLD
    q, k, v, _ = whole(seq_k=21)
    expected = ringattn.attention(q, k, v, is_causal=True)
    for layout in ("contiguous", "zigzag"):
        raises(ValueError, "give capacity", ringattn.KVCache, group, layout)
        for capacity in (21, 30):
            close(generate(ringattn.KVCache(group, layout, capacity), q, k, v, 9, False), expected[:, 8:])
        cache = ringattn.KVCache(group, layout, 30)
        cache.append(k, v)
        assert cache.key_range == (0, 21)
        padded = cache.attention(q[:, -1:], key_range=[(3, 30), (0, 5)])
        close(padded, ringattn.attention(q[:, -1:], k, v, key_range=[(3, 21), (0, 5)]))
        close(cache.attention(q), ringattn.attention(q, k, v))  # several rows, which need no positions
        close(cache.attention(q[:, -1:], key_range=(25, 30)), torch.zeros_like(q[:, -1:]))  # none of them is filled
        for wrong in ((25, 31), (5, 3), (-1, 4)):
            match = rf"key_range is {wrong}; it must lie within the 30 keys"
            raises(ValueError, match, cache.attention, q[:, -1:], key_range=wrong)
        raises(ValueError, "is_causal with 21 rows", cache.attention, q, is_causal=True)
        raises(ValueError, "window needs the positions", cache.attention, q[:, -1:], window=(4, 0))
        raises(ValueError, "holds 21 rows; 10 more exceed its capacity of 30", cache.append, k[:, :10], v[:, :10])


@check
def shards_of_a_prompt_that_are_not_a_ranks_share_are_refused():
    import ringattn

    _, k, v, _ = whole(seq_k=21)
    cache = ringattn.KVCache(dist.group.WORLD)
    extra = 2 * (dist.get_rank() == 1)
    raises(ValueError, "0 rows in the cache its share is", cache.append, k[:, : 4 + extra], v[:, : 4 + extra], sharded=True)


@check
def a_cache_is_copied_with_its_group_and_not_pickled_with_it():
    import copy
    import pickle

    import ringattn

    group = dist.group.WORLD
    q, k, v, _ = whole(seq_k=21)
    cache = ringattn.KVCache(group)
    cache.append(k[:, :9], v[:, :9])
    twin = copy.deepcopy(cache)
    assert twin.group is group and twin.key.data_ptr() != cache.key.data_ptr()
    twin.append(k[:, 9:], v[:, 9:])
    assert len(cache) == 9 and copy.copy(cache).key.data_ptr() == cache.key.data_ptr()
    close(twin.attention(q), ringattn.attention(q, k, v))
    raises(TypeError, "a KVCache on a ProcessGroup cannot be pickled: save its key and value", pickle.dumps, cache)
    alone = pickle.loads(pickle.dumps(ringattn.KVCache()))
    alone.append(k, v)
    close(alone.attention(q), ringattn.attention(q, k, v))
