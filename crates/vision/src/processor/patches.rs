//! Patches of an image as rows of values, in the order that a tower reads.

use crate::image_size::ImageSize;

/// Value of each sample of each channel: rescaled and normalized.
pub(super) type Levels = [[f32; 256]; 3];

/// Order of patches, and of the values of one.
#[derive(Clone, Debug)]
pub(super) struct PatchOrder {
    /// Side of a patch in pixels.
    pub(super) patch: usize,
    /// Side in patches of the blocks that follow each other, each row by row. 1 is row by row
    /// throughout.
    pub(super) block: usize,
    /// How often a patch is repeated, after each channel: one image stands for all frames.
    pub(super) frames: usize,
    /// Whether channels are innermost: (y, x, channel) instead of (channel, frame, y, x).
    pub(super) channels_last: bool,
}

impl PatchOrder {
    /// Number of values of a patch.
    pub(super) fn width(&self) -> usize {
        3 * self.frames * self.patch * self.patch
    }

    /// Values of all patches, `[rows * columns, width]`. Pixels beyond the image are zero bytes.
    pub(super) fn values(
        &self,
        rgb: &[u8],
        size: ImageSize,
        [rows, columns]: [usize; 2],
        levels: &Levels,
    ) -> Vec<f32> {
        let (image_width, image_height) = (size.width as usize, size.height as usize);
        let (pixels, _) = rgb.as_chunks::<3>();
        let mut values = vec![0.0; rows * columns * self.width()];
        for (index, patch) in values.chunks_exact_mut(self.width()).enumerate() {
            let [row, column] = place(index, columns, self.block);
            for y in 0..self.patch {
                let top = row * self.patch + y;
                let left = column * self.patch;
                let end = (left + self.patch).min(image_width);
                let line = match top < image_height && left < end {
                    true => &pixels[top * image_width + left..top * image_width + end],
                    false => &[],
                };
                for x in 0..self.patch {
                    let pixel = line.get(x).copied().unwrap_or_default();
                    for (c, (level, sample)) in levels.iter().zip(pixel).enumerate() {
                        patch[self.index([c, y, x])] = level[usize::from(sample)];
                    }
                }
            }
            self.repeat_frames(patch);
        }
        values
    }

    /// Place of a value in its patch, in the first frame.
    fn index(&self, [c, y, x]: [usize; 3]) -> usize {
        let pixel = y * self.patch + x;
        if self.channels_last {
            3 * pixel + c
        } else {
            c * self.frames * self.patch * self.patch + pixel
        }
    }

    fn repeat_frames(&self, patch: &mut [f32]) {
        let frame = self.patch * self.patch;
        for channel in patch.chunks_exact_mut(self.frames * frame) {
            for copy in 1..self.frames {
                channel.copy_within(..frame, copy * frame);
            }
        }
    }
}

/// Row and column of a patch by its place in the order: blocks of `side` x `side` patches.
pub(super) fn place(index: usize, columns: usize, side: usize) -> [usize; 2] {
    let (block, inside) = (index / (side * side), index % (side * side));
    let blocks = columns / side;
    [block / blocks * side + inside / side, block % blocks * side + inside % side]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of an image whose red sample is the number of the pixel.
    fn values(order: &PatchOrder, size: ImageSize, grid: [usize; 2]) -> Vec<f32> {
        let rgb: Vec<u8> =
            (1..=size.pixels() as u8).flat_map(|red| [red, red + 100, red + 200]).collect();
        let levels = [std::array::from_fn(|sample| sample as f32); 3];
        order.values(&rgb, size, grid, &levels)
    }

    #[test]
    fn blocks_of_patches_follow_each_other() {
        let order = PatchOrder { patch: 1, block: 2, frames: 2, channels_last: false };
        let values = values(&order, ImageSize { width: 4, height: 4 }, [4, 4]);
        let red: Vec<f32> = values.iter().copied().step_by(6).collect();
        let blocks = [1, 2, 5, 6, 3, 4, 7, 8, 9, 10, 13, 14, 11, 12, 15, 16];
        assert_eq!(red, blocks.map(|pixel| pixel as f32));
        assert_eq!(values[..6], [1.0, 1.0, 101.0, 101.0, 201.0, 201.0]);
    }

    #[test]
    fn values_are_in_planes_or_in_pixels() {
        let size = ImageSize { width: 2, height: 2 };
        let mut order = PatchOrder { patch: 2, block: 1, frames: 1, channels_last: false };
        let planes = [1, 2, 3, 4, 101, 102, 103, 104, 201, 202, 203, 204];
        assert_eq!(values(&order, size, [1, 1]), planes.map(|value| value as f32));
        order.channels_last = true;
        let pixels = [1, 101, 201, 2, 102, 202, 3, 103, 203, 4, 104, 204];
        assert_eq!(values(&order, size, [1, 1]), pixels.map(|value| value as f32));
    }

    #[test]
    fn pixels_beyond_the_image_are_zero_bytes() {
        let order = PatchOrder { patch: 2, block: 1, frames: 1, channels_last: true };
        let values = values(&order, ImageSize { width: 1, height: 3 }, [2, 2]);
        let red: Vec<f32> = values.iter().copied().step_by(3).collect();
        let padded = [1, 0, 2, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(red, padded.map(|value| value as f32));
    }
}
