//! Search for the weight behind a NaN: the first tensor, in the order of layers, whose file holds a
//! value that is not finite.
//!
//! Devices only notice NaN among router logits and logits, often after later work was recorded. So
//! the search reads the files, once, after a step has failed.

use std::time::{Duration, Instant};

use moeflux_base::Error;
use moeflux_compute::{BlockScale, Element, FileLayout, Format, Scalar};
use moeflux_model::{
    blueprint::Blueprint,
    checkpoint::{MatrixSource, Segment, VectorSource},
    seam::{DataFile, tensor_at},
};

use crate::experts::source::ExpertSource;

/// Time after which the search is given up. Experts of a large model may fill hundreds of GB.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes that are read at once: whole values of every type.
const BLOCK: usize = 1 << 20;

/// The search: where weights are, and which experts a step can have used.
pub(crate) struct NonFiniteSearch<'a> {
    pub(crate) blueprint: &'a Blueprint,
    pub(crate) source: &'a ExpertSource,
    /// Layer and index of the experts in memory, sorted.
    pub(crate) in_memory: Vec<(u32, u32)>,
}

/// Encoding of the values of a plane.
#[derive(Clone, Copy)]
enum PlaneValues {
    Plain(Scalar),
    Scale(BlockScale),
    Element(Element),
}

/// A value that is not finite.
struct Found {
    file: u32,
    offset: u64,
}

impl NonFiniteSearch<'_> {
    /// The error with file and tensor, if it is about NaN or infinity and a weight explains it;
    /// otherwise the error.
    pub(crate) fn explain(&self, error: Error) -> Error {
        let Error::Compute {
            source:
                moeflux_compute::Error::RouterNan { .. } | moeflux_compute::Error::LogitsNan { .. },
            ..
        } = &error
        else {
            return error;
        };
        let until = Instant::now() + TIMEOUT;
        let Blueprint { embed, layers, output, head, head_bias, .. } = self.blueprint;
        let find_layer = |layer: usize| {
            let dense = &layers[layer];
            let weights = matrices(dense.matrices()).chain(vectors(dense.vectors()));
            let mut found = self.scan_all(weights, until);
            let mut expert = None;
            if found.is_none() {
                let key = |expert: &&(u32, u32)| expert.0 as usize == layer;
                found = self.in_memory.iter().filter(key).find_map(|(_, index)| {
                    expert = Some(*index);
                    self.scan_expert(layer, *index as usize, until)
                });
            }
            let place = match expert.filter(|_| found.is_some()) {
                Some(expert) => format!("layer {layer}, expert {expert}"),
                None => format!("layer {layer}"),
            };
            found.map(|found| (found, place))
        };
        let named = |found: Option<Found>, place: &str| Some((found?, place.to_owned()));
        let found = named(self.scan_all(matrices([embed]), until), "embedding")
            .or_else(|| (0..layers.len()).find_map(find_layer))
            .or_else(|| {
                let head_vectors = vectors(output.vectors().into_iter().chain(head_bias));
                let head = head_vectors.chain(matrices(output.matrices().into_iter().chain(head)));
                named(self.scan_all(head, until), "head")
            });
        let Some((Found { file, offset }, place)) = found else { return error };
        let file = &self.source.files()[file as usize];
        let problem = format!(
            "{place}: the value at byte {offset} is NaN or infinite; the file is damaged or was \
             made wrong: download it again, or choose another conversion ({error})"
        );
        match tensor_at(file, offset) {
            Some(tensor) => Error::Tensor { tensor, path: file.path().into(), problem },
            None => Error::Checkpoint { path: file.path().into(), problem },
        }
    }

    /// The first value of an expert that is not finite.
    fn scan_expert(&self, layer: usize, expert: usize, until: Instant) -> Option<Found> {
        let experts = self.source.layer(layer)?;
        if expert >= experts.count || Instant::now() > until {
            return None;
        }
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(experts.file_bytes).ok()?;
        bytes.resize(experts.file_bytes, 0);
        self.source.read_file(layer, expert, &mut bytes).ok()?;
        let planes = experts.shape.file_planes(experts.layouts).ok()?;
        // Offset among the expert's bytes to offset in the file.
        let mut at = planes.into_iter().find_map(|plane| {
            let values = plane_values(plane.layout, plane.format, plane.index)?;
            let at = values.first_non_finite(&bytes[plane.offset..][..plane.bytes])?;
            Some(plane.offset + at)
        })?;
        experts.segments(expert).find_map(|segment| match at < segment.bytes {
            true => Some(Found { file: segment.file, offset: segment.offset + at as u64 }),
            false => {
                at -= segment.bytes;
                None
            }
        })
    }

    fn scan_all(
        &self,
        mut planes: impl Iterator<Item = (Segment, PlaneValues)>,
        until: Instant,
    ) -> Option<Found> {
        planes.find_map(|(segment, values)| self.scan(segment, values, until))
    }

    /// The first value of a plane in a file that is not finite.
    fn scan(&self, segment: Segment, values: PlaneValues, until: Instant) -> Option<Found> {
        let file: &DataFile = &self.source.files()[segment.file as usize];
        let mut block = vec![0; BLOCK.min(segment.bytes)];
        let mut done = 0;
        while done < segment.bytes && Instant::now() < until {
            let len = BLOCK.min(segment.bytes - done);
            let offset = segment.offset + done as u64;
            file.read_exact_at(&mut block[..len], offset).ok()?;
            if let Some(at) = values.first_non_finite(&block[..len]) {
                return Some(Found { file: segment.file, offset: offset + at as u64 });
            }
            done += len;
        }
        None
    }
}

/// Planes of matrices that can hold NaN or infinity.
fn matrices<'a>(
    matrices: impl IntoIterator<Item = &'a MatrixSource>,
) -> impl Iterator<Item = (Segment, PlaneValues)> {
    matrices.into_iter().flat_map(|matrix| {
        let planes = matrix.segments.iter().enumerate();
        planes.filter_map(|(i, segment)| {
            Some((*segment, plane_values(matrix.layout, matrix.shape.format, i)?))
        })
    })
}

fn vectors<'a>(
    vectors: impl IntoIterator<Item = &'a VectorSource>,
) -> impl Iterator<Item = (Segment, PlaneValues)> {
    vectors.into_iter().map(|vector| (vector.segment, PlaneValues::Plain(vector.scalar)))
}

/// Encoding of plane `i` of a format in a file; `None` if all its values are finite.
fn plane_values(layout: FileLayout, format: Format, i: usize) -> Option<PlaneValues> {
    match (layout, i) {
        (FileLayout::FactoredScales(_), 1) => return Some(PlaneValues::Scale(BlockScale::E4M3)),
        (FileLayout::FactoredScales(_), 2) => return Some(PlaneValues::Plain(Scalar::F32)),
        (FileLayout::InputMajor(layout), 1) => return Some(PlaneValues::Plain(layout.scale)),
        (FileLayout::InputMajor(_), _) => return None,
        _ => {}
    }
    match (format, i) {
        (Format::Plain(scalar), 0) => Some(PlaneValues::Plain(scalar)),
        (Format::Affine(affine), 1 | 2) => Some(PlaneValues::Plain(affine.scale)),
        (Format::BlockScaled(scaled), 0) => match scaled.element {
            Element::E2M1 => None,
            element => Some(PlaneValues::Element(element)),
        },
        (Format::ScaledBlocks(_), 1) => Some(PlaneValues::Plain(Scalar::F32)),
        (Format::BlockScaled(scaled), 1) => Some(PlaneValues::Scale(scaled.scale)),
        _ => None,
    }
}

impl PlaneValues {
    /// Offset of the first value that is not finite.
    fn first_non_finite(self, bytes: &[u8]) -> Option<usize> {
        let width = match self {
            PlaneValues::Plain(scalar) => scalar.bytes(),
            PlaneValues::Scale(scale) => scale.bytes(),
            PlaneValues::Element(_) => 1,
        };
        let is_finite = |i: usize| {
            let value = match self {
                PlaneValues::Plain(scalar) => scalar.get(bytes, i),
                PlaneValues::Scale(scale) => scale.get(bytes, i),
                PlaneValues::Element(element) => element.get(bytes, i),
            };
            value.is_finite()
        };
        (0..bytes.len() / width).find(|i| !is_finite(*i)).map(|i| i * width)
    }
}
