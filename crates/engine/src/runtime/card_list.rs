//! Card list: a device name such as `gpu:0,gpu:1`, whose cards compute together.

use moeflux_base::{Error, PlanError};
use moeflux_compute::{Adapter, AdapterKind, Device, group_cards};

use super::{card_budgets::MAX_CARDS, open_device::OpenDevice};

/// Names of the cards in the name of a device; `None` if it is a single one.
pub(super) fn card_names(name: &str) -> Option<Vec<&str>> {
    name.contains(',').then(|| name.split(',').map(str::trim).collect())
}

/// Opens cards as one device. All of them have memory of their own, or all of them share the
/// host's.
pub(super) fn open_cards(
    names: &[&str],
    adapters: &dyn Fn() -> Vec<Adapter>,
    open: &OpenDevice<'_>,
) -> Result<Box<dyn Device>, Error> {
    if names.len() > MAX_CARDS {
        return Err(PlanError::CardCount { given: names.len(), most: MAX_CARDS }.into());
    }
    check_names(names, adapters)?;
    let mut cards: Vec<Box<dyn Device>> = Vec::with_capacity(names.len());
    for name in names {
        // All cards have the id of the first one.
        let id = cards.first().map(|first| first.id());
        let card = open(name, id)?;
        let Some(memory) = card.memory() else {
            return Err(PlanError::NotACard { name: (*name).to_owned() }.into());
        };
        let first = cards.first().and_then(|first| first.memory());
        if first.is_some_and(|first| first.unified != memory.unified) {
            return Err(PlanError::MixedCards { name: (*name).to_owned() }.into());
        }
        cards.push(card);
    }
    group_cards(cards).map_err(Error::at(|| "opening the device"))
}

/// Checks that a list names adapters by their index, and hardware only once.
fn check_names(names: &[&str], adapters: &dyn Fn() -> Vec<Adapter>) -> Result<(), Error> {
    let mut seen: Vec<usize> = Vec::with_capacity(names.len());
    let mut known = None;
    for name in names {
        let index = match name.strip_prefix("gpu") {
            Some(index) => index.strip_prefix(':').and_then(|index| index.parse().ok()),
            // Other names are those of devices without a card's memory, unless they are wrapped.
            None if ["cpu", "reference"].contains(name) => continue,
            None => None,
        };
        let Some(index) = index else {
            return Err(PlanError::NotACard { name: (*name).to_owned() }.into());
        };
        if seen.contains(&index) {
            let all = known.get_or_insert_with(adapters);
            let is_software = |adapter: &&Adapter| adapter.kind == AdapterKind::Software;
            let adapter = all.iter().find(|adapter| adapter.index == index);
            if adapter.filter(is_software).is_none() {
                return Err(PlanError::SameCard { name: (*name).to_owned() }.into());
            }
        }
        seen.push(index);
    }
    Ok(())
}
