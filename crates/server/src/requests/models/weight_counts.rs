//! Numbers of weights of a model.

use std::collections::BTreeMap;

use moeflux::model::blueprint::Blueprint;

/// Number of weights.
pub(crate) fn parameters(blueprint: &Blueprint) -> u64 {
    let tables = blueprint.memories().map(|(_, memory)| memory.table.parameters());
    let vectors = blueprint.vectors().map(|vector| vector.len as u64);
    formats(blueprint).into_values().chain(vectors).chain(tables).sum()
}

/// Weights of all matrices by the name of their format.
pub(crate) fn formats(blueprint: &Blueprint) -> BTreeMap<String, u64> {
    let size = |rows: usize, cols: usize| rows as u64 * cols as u64;
    let dense = blueprint.matrices().map(|matrix| {
        let shape = &matrix.shape;
        (shape.format.name(), size(shape.rows, shape.cols))
    });
    let experts = blueprint.moe_layers().flat_map(|(_, moe)| {
        let count = moe.experts.count as u64;
        let matrices = moe.experts.shape.matrices();
        matrices.map(move |m| (m.format.name(), count * size(m.rows, m.cols))).collect::<Vec<_>>()
    });
    let mut formats = BTreeMap::new();
    for (name, parameters) in dense.chain(experts) {
        *formats.entry(name).or_default() += parameters;
    }
    formats
}
