//! Placement of packed experts: checks a packed file against the blueprint and points its experts there.

use crate::{
    base::error::Error,
    checkpoint::{
        Checkpoint, Segment, digest,
        location::ShardLocation,
        packed::{NOWHERE, Packed, matrices},
    },
    model::blueprint::{Blueprint, LayerExperts},
};

/// Digest of where the experts of a layer lie: offset and bytes, as u64, of each segment of each expert. Offsets are those
/// of the header's tensors, laid one after another.
pub(crate) fn order(experts: &LayerExperts) -> u64 {
    let segments = (0..experts.count).flat_map(|e| experts.segments(e));
    let bytes: Vec<u8> = segments
        .flat_map(|s| [s.offset.wrapping_sub(NOWHERE), s.bytes as u64])
        .flat_map(u64::to_le_bytes)
        .collect();
    digest(&bytes)
}

impl Checkpoint {
    /// Gives the experts of a blueprint their records, where there are some.
    ///
    /// # Errors
    /// The records are not those of this model.
    pub(crate) fn place_packed(&self, blueprint: &mut Blueprint) -> Result<(), Error> {
        let Some(packed) = self.packed() else { return Ok(()) };
        let path = self.files()[packed.file as usize].path();
        place(packed, blueprint).map_err(|problem| Error::Checkpoint {
            path: path.into(),
            problem: format!("{problem}: pack the model again, with this version of moeflux"),
        })
    }
}

fn place(packed: &Packed, blueprint: &mut Blueprint) -> Result<(), String> {
    let dense = blueprint
        .matrices()
        .flat_map(|m| &m.segments)
        .chain(blueprint.vectors().map(|v| &v.segment));
    if dense.into_iter().any(|segment| segment.file == packed.file) {
        return Err("it has tensors that are not those of experts".into());
    }
    let mut offset = packed.data;
    let mut left = blueprint.layers.iter_mut().enumerate();
    for l in &packed.header.layers {
        // Both go from the first layer to the last one.
        let found = left.by_ref().find_map(|(i, layer)| Some((i, layer.moe_mut()?)));
        let Some((_, moe)) = found.filter(|(i, _)| *i == l.layer) else {
            return Err(format!(
                "it has records for layer {}, config.json asks for others",
                l.layer
            ));
        };
        let experts = &mut moe.experts;
        if (experts.count, experts.bytes as u64) != (l.experts, l.bytes)
            || order(experts) != l.order.0[0]
            || matrices(&experts.shape) != l.matrices
        {
            return Err(format!(
                "the records of layer {} hold {} experts of {} bytes in an order that is not that of its slots",
                l.layer, l.experts, l.bytes
            ));
        }
        let stride = l.stride().unwrap_or(l.bytes);
        let first = Segment { file: packed.file, offset, bytes: experts.bytes };
        let digests = l.digests.0.as_slice().into();
        experts.parts = vec![ShardLocation::Packed { first, stride, digests }];
        offset += stride * l.experts as u64;
    }
    match left.find_map(|(i, layer)| layer.moe().map(|_| i)) {
        Some(i) => Err(format!("it has no records for layer {i}")),
        None => Ok(()),
    }
}
