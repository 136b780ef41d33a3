// Queries, keys and values are there.
// implements: @convolution

fn convolve(head: u32, value: u32, index: u32) {}
