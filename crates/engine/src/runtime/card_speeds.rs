//! Card speeds: relative memory bandwidths of cards that differ.

use std::time::Instant;

use moeflux_base::Error;
use moeflux_compute::{Adapter, Bytes, Device, Format, MatrixShape, Op, Scalar, View};

use super::{card_budgets::MAX_CARDS, layer_cards::FULL_SPEED, open_device::OpenDevice};

/// Shape of the measured matrix, 128 MiB of bf16: more than the caches of most cards hold.
const ROWS: usize = 1 << 14;
const COLS: usize = 1 << 12;

/// Products that are timed together, and how often.
const PRODUCTS: usize = 8;
const ROUNDS: usize = 3;

/// Relative speeds of several cards, in sixteenths of the fastest one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardSpeeds([u64; MAX_CARDS]);

impl CardSpeeds {
    /// Speeds from bandwidths of the cards, in their order. A card without one, or whose bandwidth
    /// is not a number, has the speed of the slowest kind.
    pub fn new(bandwidths: &[f64]) -> Self {
        let most = bandwidths.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        let mut speeds = [1; MAX_CARDS];
        for (speed, bandwidth) in speeds.iter_mut().zip(bandwidths) {
            *speed = ((bandwidth / most * FULL_SPEED as f64).round() as u64).clamp(1, FULL_SPEED);
        }
        Self(speeds)
    }

    /// Speed of a card, from 1 to [`FULL_SPEED`].
    pub(super) fn of_card(self, card: usize) -> u64 {
        self.0.get(card).copied().unwrap_or(1)
    }
}

/// Measures cards of different kinds, on devices that are closed again. `None` if all are of one
/// kind: their speeds are the same, whatever a measurement says.
pub(super) fn measure_kinds(
    names: &[&str],
    adapters: &[Adapter],
    open: &OpenDevice<'_>,
) -> Result<Option<CardSpeeds>, Error> {
    let kind = |name: &str| {
        let adapter = adapters.iter().find(|adapter| name == format!("gpu:{}", adapter.index));
        adapter.map(|adapter| &*adapter.name)
    };
    let kinds: Vec<Option<&str>> = names.iter().map(|name| kind(name)).collect();
    if kinds.windows(2).all(|pair| pair[0] == pair[1]) {
        return Ok(None);
    }
    let mut bandwidths: Vec<f64> = Vec::with_capacity(names.len());
    for (i, name) in names.iter().enumerate() {
        let bandwidth = match kinds[..i].iter().position(|kind| *kind == kinds[i]) {
            Some(same) => bandwidths[same],
            None => bandwidth(&mut *open(name, None)?)
                .map_err(Error::at(|| format!("measuring the speed of {name}")))?,
        };
        bandwidths.push(bandwidth);
    }
    Ok(Some(CardSpeeds::new(&bandwidths)))
}

/// Measures a card's bandwidth in bytes per second, by products of a matrix and one row.
fn bandwidth(card: &mut dyn Device) -> Result<f64, moeflux_compute::Error> {
    let shape = MatrixShape { rows: ROWS, cols: COLS, format: Format::Plain(Scalar::BF16) };
    let bytes = shape.plane_bytes()?.total();
    let weight = card.weight(shape, Bytes::zeroed(bytes)?)?;
    let (x, out) = (card.buffer(COLS)?, card.buffer(ROWS)?);
    let (x, out) = (View::rows(x, 1, COLS), View::rows(out, 1, ROWS));
    let product = Op::MatMul { x, weight, bias: None, exact: false, answers: x.few(), out };
    let mut sums = vec![0.0; ROWS];
    let mut seconds = f64::INFINITY;
    // The first round compiles kernels.
    for _ in 0..=ROUNDS {
        let since = Instant::now();
        (0..PRODUCTS).try_for_each(|_| card.run(&product))?;
        card.read(out, &mut sums)?;
        seconds = seconds.min(since.elapsed().as_secs_f64());
    }
    Ok((PRODUCTS * bytes) as f64 / seconds.max(f64::MIN_POSITIVE))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use moeflux_compute::{AdapterKind, DeviceOptions};

    use super::*;

    fn adapter(index: usize, name: &str) -> Adapter {
        Adapter {
            index,
            name: name.to_owned(),
            backend: "vulkan".into(),
            kind: AdapterKind::Discrete,
            driver: String::new(),
            memory: None,
            max_buffer: 1 << 30,
            max_binding: 1 << 30,
            subgroup: None,
            f16: false,
            cooperative_matrix: false,
            unusable: None,
        }
    }

    #[test]
    fn speeds_are_relative_to_the_fastest_card() {
        let of = |bandwidths: &[f64]| {
            let speeds = CardSpeeds::new(bandwidths);
            (0..4).map(|card| speeds.of_card(card)).collect::<Vec<_>>()
        };
        assert_eq!(of(&[450e9, 900e9, 880e9]), [8, 16, 16, 1]);
        assert_eq!(of(&[f64::NAN, 0.0, 1.0, 1e-9]), [1, 1, 16, 1]);
        assert_eq!(of(&[]), [1; 4]);
        assert_eq!(CardSpeeds::new(&[1.0; 17]).of_card(16), 1);
    }

    #[test]
    fn each_kind_of_card_is_measured_once() {
        let adapters = [adapter(0, "a"), adapter(1, "b"), adapter(2, "a")];
        let opened = RefCell::new(Vec::new());
        let open = |name: &str, id| {
            opened.borrow_mut().push(name.to_owned());
            let options = DeviceOptions::default().threads(1).id(id);
            moeflux_compute::open(&options).map_err(Error::at(|| "opening"))
        };
        assert_eq!(measure_kinds(&["gpu:0", "gpu:2"], &adapters, &open).unwrap(), None);
        assert!(opened.borrow().is_empty());
        let speeds = measure_kinds(&["gpu:0", "gpu:1", "gpu:2"], &adapters, &open).unwrap();
        let speeds = speeds.unwrap();
        assert_eq!(*opened.borrow(), ["gpu:0", "gpu:1"]);
        assert_eq!(speeds.of_card(0), speeds.of_card(2));
        assert!((0..3).any(|card| speeds.of_card(card) == FULL_SPEED));
    }
}
