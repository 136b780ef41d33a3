//! Placement of packed experts: checks a packed file against a blueprint and points the experts of
//! the blueprint to its records.

use moeflux_base::Error;

use crate::{
    blueprint::{Blueprint, LayerExperts},
    checkpoint::{
        Checkpoint, Segment, digest,
        location::ShardLocation,
        packed::{PackedExperts, VIRTUAL_OFFSET, describe_matrices},
    },
};

/// Digest of the source locations of a layer's experts: offset and length, as u64, of each segment
/// of each expert. Offsets are relative to the header's tensors, placed contiguously.
pub fn layout_digest(experts: &LayerExperts) -> u64 {
    let segments = (0..experts.count).flat_map(|e| experts.segments(e));
    let bytes: Vec<u8> = segments
        .flat_map(|s| [s.offset.wrapping_sub(VIRTUAL_OFFSET), s.bytes as u64])
        .flat_map(u64::to_le_bytes)
        .collect();
    digest(&bytes)
}

impl Checkpoint {
    /// Points the experts of a blueprint to their records, if this is a packed model.
    ///
    /// # Errors
    /// The records do not belong to this model.
    pub(crate) fn place_packed(&self, blueprint: &mut Blueprint) -> Result<(), Error> {
        let Some(packed) = self.packed() else { return Ok(()) };
        let path = self.files()[packed.file as usize].path();
        place(packed, blueprint).map_err(|problem| Error::Checkpoint {
            path: path.into(),
            problem: format!("{problem}: pack the model again, with this version of moeflux"),
        })
    }
}

fn place(packed: &PackedExperts, blueprint: &mut Blueprint) -> Result<(), String> {
    let dense = blueprint
        .matrices()
        .flat_map(|m| &m.segments)
        .chain(blueprint.vectors().map(|v| &v.segment));
    if dense.into_iter().any(|segment| segment.file == packed.file) {
        return Err("it has tensors that do not belong to experts".into());
    }
    let mut offset = packed.data;
    let mut left = blueprint.layers.iter_mut().enumerate();
    for l in &packed.header.layers {
        // Both are in ascending order of layers.
        let found = left.by_ref().find_map(|(i, layer)| Some((i, layer.moe_mut()?)));
        let Some((_, moe)) = found.filter(|(i, _)| *i == l.layer) else {
            return Err(format!(
                "it has records for layer {}, config.json asks for others",
                l.layer
            ));
        };
        let experts = &mut moe.experts;
        if (experts.count, experts.file_bytes as u64) != (l.experts, l.bytes)
            || layout_digest(experts) != l.order.0[0]
            || describe_matrices(&experts.shape) != l.matrices
        {
            return Err(format!(
                "the records of layer {} hold {} experts of {} bytes in an order that differs from \
                 that of its slots",
                l.layer, l.experts, l.bytes
            ));
        }
        let stride = l.stride().unwrap_or(l.bytes);
        let first = Segment { file: packed.file, offset, bytes: experts.file_bytes };
        let digests = l.digests.0.as_slice().into();
        experts.shards = vec![ShardLocation::Packed { first, stride, digests }];
        offset += stride * l.experts as u64;
    }
    match left.find_map(|(i, layer)| layer.moe().map(|_| i)) {
        Some(i) => Err(format!("it has no records for layer {i}")),
        None => Ok(()),
    }
}
