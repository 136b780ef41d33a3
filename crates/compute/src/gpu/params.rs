//! What a kernel is told besides its buffers: words in the order of its `struct Params`.

use crate::View;

/// Up to 32 words.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Params {
    words: [u32; 32],
    len: usize,
}

impl Params {
    pub(super) fn new() -> Self {
        Self::default()
    }

    #[must_use]
    #[inline(always)]
    pub(super) fn u(mut self, word: u32) -> Self {
        debug_assert!(self.len < 32);
        self.words[self.len] = word;
        self.len += 1;
        self
    }

    #[must_use]
    pub(super) fn n(self, number: usize) -> Self {
        self.u(number as u32)
    }

    #[must_use]
    pub(super) fn f(self, number: f32) -> Self {
        self.u(number.to_bits())
    }

    /// A view that begins at number `at` of the activations: `View` of `common.wgsl`.
    #[must_use]
    pub(super) fn view(self, at: u32, view: &View) -> Self {
        self.u(at).n(view.row_stride).n(view.head_stride)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }
}
