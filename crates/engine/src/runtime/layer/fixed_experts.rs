//! Hash routing: experts that follow from the token ids.

use std::sync::Arc;

use moeflux_base::Error;
use moeflux_compute::Weight;
use moeflux_model::blueprint::FixedRoutes;

use super::loader::Loader;

/// Table of the experts of each token, `(vocab, top_k)`, on the device and on the host.
#[derive(Debug)]
pub(super) struct FixedExperts {
    pub(super) table: Weight,
    ids: Arc<[u16]>,
}

impl FixedExperts {
    pub(super) fn load(
        routes: &FixedRoutes,
        k: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        let rows = routes.ids.len() / k.max(1);
        let table = loader.id_table(rows, k, &routes.ids)?;
        Ok(Self { table, ids: Arc::clone(&routes.ids) })
    }

    /// Ids of the experts of tokens, by token and rank.
    pub(super) fn ids_of(&self, tokens: &[u32], k: usize) -> impl Iterator<Item = u32> {
        let of_token = move |token: &u32| self.ids.get(*token as usize * k..).unwrap_or_default();
        tokens.iter().flat_map(move |token| of_token(token).iter().take(k)).map(|id| u32::from(*id))
    }
}
