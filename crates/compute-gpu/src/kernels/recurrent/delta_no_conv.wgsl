// No convolution: q, k and v are given.
// implements: @convolution

fn convolve(sequence: u32, head: u32, value: u32, index: u32) {}
