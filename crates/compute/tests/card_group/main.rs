//! Groups of cards: a model on one device and divided among two, and the duties of a group.
//!
//! The cards are two CPU devices and, if there is a GPU, two devices on its adapter.
//! `MOEFLUX_TEST_GPU` selects the adapter, or `none`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests"
)]

mod controlled_card;
mod duties;
mod failures;
mod layers;
mod model;
mod states;

use moeflux_compute::{
    Bytes, Device, DeviceId, DeviceOptions, Error, Format, KvFormat, MatrixShape, Scalar,
    StateShape, group_cards, open,
};

const KV: StateShape =
    StateShape::KeyValue { kv_heads: 2, key_width: 16, value_width: 16, positions: 64 };
const RECURRENT: StateShape = StateShape::Recurrent { len: 100 };

/// Options of a device on a path, for each kind of device to test.
fn kinds(exact: bool) -> Vec<DeviceOptions> {
    let cpu = DeviceOptions::default().name("cpu").threads(1).exact(exact);
    let requested = std::env::var("MOEFLUX_TEST_GPU").ok();
    let name = requested.clone().unwrap_or_else(|| "gpu".into());
    // Emulations belong to the conformance tests.
    if requested.as_deref().is_some_and(|name| !name.starts_with("gpu")) {
        return vec![cpu];
    }
    let gpu = DeviceOptions::default().name(name).exact(exact);
    match open(&gpu) {
        Ok(_) => vec![cpu, gpu],
        Err(error) => {
            assert!(requested.is_none(), "{error}");
            eprintln!("no GPU is tested: {error}");
            vec![cpu]
        }
    }
}

/// Opens two devices of one id.
fn open_cards(options: &DeviceOptions) -> Vec<Box<dyn Device>> {
    let first = open(options).unwrap();
    let second = open(&options.clone().id(first.id())).unwrap();
    vec![first, second]
}

/// A group of two devices.
fn group(options: &DeviceOptions) -> Box<dyn Device> {
    group_cards(open_cards(options)).unwrap()
}

/// A group of two CPU devices, layer 0 on card 0 and later ones on card 1.
fn cpu_group() -> Box<dyn Device> {
    let mut group = group(&DeviceOptions::default().name("cpu").threads(1).exact(true));
    group.split_layers(&[0, 1]).unwrap();
    group
}

/// A weight of one value.
fn scalar_weight(device: &mut dyn Device, value: f32) -> moeflux_compute::Weight {
    let shape = MatrixShape { rows: 1, cols: 1, format: Format::Plain(Scalar::F32) };
    device.weight(shape, to_bytes(&[value])).unwrap()
}

/// Values as bytes of a matrix.
fn to_bytes(values: &[f32]) -> Bytes {
    let mut bytes = Bytes::zeroed(values.len() * 4).unwrap();
    for (bytes, value) in bytes.chunks_exact_mut(4).zip(values) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

fn message<T>(result: Result<T, Error>) -> String {
    result.err().expect("an error").to_string()
}

#[test]
fn a_group_has_several_cards_of_one_id_and_format() {
    let cpu = DeviceOptions::default().name("cpu").threads(1);
    let none = message(group_cards(Vec::new()));
    assert!(none.contains("at least 2 cards, not 0"), "{none}");
    let single = message(group_cards(vec![open(&cpu).unwrap()]));
    assert!(single.contains("at least 2 cards, not 1"), "{single}");
    let other_id = message(group_cards(vec![open(&cpu).unwrap(), open(&cpu).unwrap()]));
    assert!(other_id.contains("cards 0 and 1 of a group have different ids"), "{other_id}");
    let mut cards = open_cards(&cpu);
    let id: DeviceId = cards[0].id();
    cards.push(open(&cpu.clone().id(id).kv_format(KvFormat::F32)).unwrap());
    let other_format = message(group_cards(cards));
    assert!(other_format.contains("as f16, but card 2 as f32"), "{other_format}");

    let group = group(&cpu);
    let of_group = (group.id(), group.kv_format(), group.cards(), group.card(2).is_none());
    let first = group.card(0).unwrap();
    assert_eq!(of_group, (first.id(), KvFormat::F16, 2, true));
    assert_eq!(group.describe(), format!("{0}; {0}", first.describe()));
    let alone = open(&cpu).unwrap();
    assert!(alone.cards() == 1 && alone.card(0).is_none() && alone.is_same_card(0, 9));
}
