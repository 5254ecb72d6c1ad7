'''The optimizer swapper: an optimizer whose state is on the drive between steps.

The mechanism in plain PyTorch, with one buffer and one file. For each bucket of parameters the state comes from the
file into the buffer, the class's own `step` runs on it there, and the buffer goes back to the file:

    >>> import tempfile, torch
    >>> MOVES = ("exp_avg", "exp_avg_sq")
    >>> def views_of(buffer, bucket):
    ...     """The state of each parameter of a bucket, as views of the buffer that its record is in."""
    ...     pieces = iter(buffer.split([p.numel() for p in bucket for _ in MOVES]))
    ...     return {p: {key: next(pieces).view_as(p) for key in MOVES} for p in bucket}
    >>> def swapped_step(optimizer, buckets, buffers, file, small):
    ...     groups = optimizer.param_groups
    ...     for bucket, buffer, offset_bytes in zip(buckets, buffers, (0, 4096)):
    ...         file.seek(offset_bytes)  # stage: drive -> buffer
    ...         file.readinto(buffer.numpy())
    ...         state = views_of(buffer, bucket)
    ...         # The class sees one bucket. Before its first step there is no state: the class makes it.
    ...         optimizer.param_groups = [{**groups[0], "params": bucket}]
    ...         optimizer.state.update({p: {**small[p], **state[p]} for p in bucket if p in small})
    ...         type(optimizer).step(optimizer)
    ...         for p in bucket:  # Small state stays in memory. State that the class has replaced is copied.
    ...             left = optimizer.state.pop(p)
    ...             small[p] = {key: value for key, value in left.items() if key not in MOVES}
    ...             for key in MOVES:
    ...                 state[p][key].copy_(left[key])
    ...         file.seek(offset_bytes)  # evict: buffer -> drive
    ...         _ = file.write(buffer.numpy())
    ...     optimizer.param_groups = groups
    >>> def trained(swaps):
    ...     torch.manual_seed(0)
    ...     model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    ...     optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ...     buckets = [list(layer.parameters()) for layer in model]
    ...     pool = torch.empty(2 * 144)  # One buffer for all buckets, as long as the longest.
    ...     buffers = [pool[: 2 * sum(p.numel() for p in bucket)] for bucket in buckets]
    ...     small = {}
    ...     with tempfile.TemporaryFile(buffering=0) as file:
    ...         for _ in range(3):
    ...             optimizer.zero_grad()
    ...             model(torch.ones(2, 8)).square().sum().backward()
    ...             swapped_step(optimizer, buckets, buffers, file, small) if swaps else optimizer.step()
    ...     return list(model.parameters())
    >>> all(map(torch.equal, trained(swaps=True), trained(swaps=False)))
    True

The package adds what makes this work for any class and any size, on time. `probe` learns the layout of a class's state,
and whether the class can be stepped in slices; `cuts` says where, so that the bits stay; `segments` and `plan` lay the
slices out in records. `records` and `operands` open one for a step, and `stepper` has the class step one after another,
while others are read and written. `conversion` puts that on the user's object, `guarded_state` is its `state` then,
`state_dicts` takes state in and out, and `swapper` is what users call.
'''
