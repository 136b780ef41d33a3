use std::sync::Arc;

use moeflux_compute::{BankPlace, Device, DeviceOptions, Span, SplitMix64, open};
use moeflux_model::{
    blueprint::{Blueprint, NormSource},
    checkpoint::Checkpoint,
    seam::{MAX_STATES, ReadAhead},
};

use super::*;
use crate::{
    experts::{
        cache::{CacheTiers, ExpertCache, SlotAccess},
        io::{Completion, ReadRequest, Reader},
        policy::PolicyKind,
        slot_classes::SlotClasses,
        source::ExpertSource,
        stats::Stats,
        tier::{Tier, TierSize},
    },
    runtime::{
        layer::{RowPositions, moe_state::MoeState, scratch::Scratch},
        spans::RowKinds,
    },
};

const ROWS: usize = 3;
const CONTEXT: usize = 16;

/// Reader of a cache without experts.
struct IdleReader;

impl Reader for IdleReader {
    fn start(&mut self, _: ReadRequest) {}

    fn next(&mut self, _: bool) -> Option<Completion> {
        None
    }
}

/// Parts of the last layer of the built-in model.
struct Parts {
    norm: NormSource,
    /// Grouped-query attention.
    mixer: BodyBlueprint,
    /// Shared expert as a dense MLP.
    mlp: BodyBlueprint,
    /// Routed experts.
    moe: BodyBlueprint,
}

impl Parts {
    fn take(blueprint: &mut Blueprint) -> Self {
        let layer = blueprint.layers.pop().unwrap();
        let [mixer, feed_forward] = <[SubBlockBlueprint; 2]>::try_from(layer.sub_blocks).unwrap();
        let SubBlockInput::Residual { norm } = mixer.input else { panic!("no norm") };
        let BodyBlueprint::FeedForward(FeedForwardBlueprint::Moe(mut moe)) = feed_forward.body
        else {
            panic!("no experts")
        };
        let mlp = moe.shared.take().unwrap().mlp;
        Self {
            norm,
            mixer: mixer.body,
            mlp: BodyBlueprint::FeedForward(mlp.into()),
            moe: BodyBlueprint::FeedForward(FeedForwardBlueprint::Moe(moe)),
        }
    }
}

/// A blueprint with one layer, on the reference device.
struct LoadedLayer {
    device: Box<dyn Device>,
    blueprint: Blueprint,
    layer: Layer,
}

fn load(sub_blocks: impl FnOnce(Parts) -> Vec<SubBlockBlueprint>) -> LoadedLayer {
    let checkpoint = Checkpoint::embedded(&moeflux_tales::FILES).unwrap();
    let mut blueprint = Blueprint::for_checkpoint(&checkpoint).unwrap();
    let layer =
        LayerBlueprint { memory: None, sub_blocks: sub_blocks(Parts::take(&mut blueprint)) };
    let options = DeviceOptions::default().name("reference");
    let mut device = open(&options).unwrap();
    let mut loader = Loader {
        checkpoint: &checkpoint,
        ahead: &ReadAhead::new(&checkpoint, std::iter::empty(), 0),
        device: &mut *device,
        exact: true,
        context: CONTEXT,
        chunk: ROWS,
        progress: &mut |_| Ok(()),
        last_order: None,
    };
    let loaded = Layer::load(&layer, blueprint.streams, &mut loader).unwrap();
    blueprint.layers = vec![layer];
    LoadedLayer { device, blueprint, layer: loaded }
}

/// `(ROWS, hidden)` each.
struct LayerOutput {
    /// Residual stream after the layer.
    x: Vec<f32>,
    /// Output of the last sub-block.
    last: Vec<f32>,
}

/// Runs a layer without routed experts on the residual stream `x`.
fn run(x: &[f32], sub_blocks: impl FnOnce(Parts) -> Vec<SubBlockBlueprint>) -> LayerOutput {
    let LoadedLayer { mut device, blueprint, layer } = load(sub_blocks);
    let device = &mut *device;
    let source = Arc::new(ExpertSource::new(Arc::default(), Vec::new()));
    let classes = &SlotClasses::uniform(1, 1);
    let size = TierSize { classes, slots: &[1], has_shared: false };
    let host = Tier::new(device, &source, size, BankPlace::Host, PolicyKind::Lru).unwrap();
    let access = SlotAccess { device_lookup: false, host_in_place: true, holds_all: false };
    let tiers = CacheTiers { host, card: None };
    let mut cache = ExpertCache::new(source, Box::new(IdleReader), tiers, access);
    let mut spans: [_; MAX_STATES] = std::array::from_fn(|_| Vec::new());
    for (spans, shape) in spans.iter_mut().zip(blueprint.layers[0].states(CONTEXT, ROWS)) {
        spans.push(Span::new(device.state(shape).unwrap(), 0, ROWS));
    }
    let scratch = Scratch::new(&blueprint, ROWS, CONTEXT, device).unwrap();
    device.write(scratch.x, x).unwrap();
    let mut step = Step {
        device,
        cache: &mut cache,
        host: None,
        hands_over: false,
        row_store: None,
        moe_state: &mut MoeState::default(),
        scratch: &scratch,
        stats: &mut Stats::default(),
        observer: None,
        spans: &spans,
        positions: RowPositions::Indices,
        tokens: &[0; ROWS],
        layer: 0,
        next: None,
        rows: ROWS,
        first_row: 0,
        kinds: RowKinds::default(),
        hidden: blueprint.hidden,
        streams: blueprint.streams,
        eps: blueprint.eps,
        gathered: None,
    };
    layer.run(&mut step).unwrap();
    let [x, last] = [step.x(), step.mixed()].map(|view| {
        let mut values = vec![0.0; ROWS * blueprint.hidden];
        step.device.read(view, &mut values).unwrap();
        values
    });
    LayerOutput { x, last }
}

/// Elementwise sum.
fn sum(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn residual(norm: &NormSource, body: BodyBlueprint) -> SubBlockBlueprint {
    SubBlockBlueprint::new(norm.clone(), body)
}

fn parallel(body: BodyBlueprint) -> SubBlockBlueprint {
    SubBlockBlueprint { input: SubBlockInput::Previous, body, post_norm: None, scale: None }
}

#[test]
fn sub_blocks_run_alone_in_sequence_and_in_parallel() {
    let hidden = Blueprint::for_checkpoint(&Checkpoint::embedded(&moeflux_tales::FILES).unwrap())
        .unwrap()
        .hidden;
    let mut random = SplitMix64::new(1);
    let mut value = || (random.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0;
    let x: Vec<f32> = (0..ROWS * hidden).map(|_| value()).collect();

    let mixed = run(&x, |p| vec![residual(&p.norm, p.mixer)]);
    assert_ne!(mixed.x, x);
    assert_eq!(mixed.x, sum(&x, &mixed.last));
    let fed = run(&x, |p| vec![residual(&p.norm, p.mlp)]);
    assert_ne!(fed.x, x);
    assert_eq!(fed.x, sum(&x, &fed.last));

    let sequence = run(&x, |p| vec![residual(&p.norm, p.mixer), residual(&p.norm, p.mlp)]);
    assert_eq!(sequence.x, run(&mixed.x, |p| vec![residual(&p.norm, p.mlp)]).x);
    let both = run(&x, |p| vec![residual(&p.norm, p.mixer), parallel(p.mlp)]);
    assert_eq!(both.x, sum(&mixed.x, &fed.last));
    assert_ne!(both.x, sequence.x);
    let swapped = run(&x, |p| vec![residual(&p.norm, p.mlp), parallel(p.mixer)]);
    assert_eq!(swapped.x, sum(&fed.x, &mixed.last));
}

#[test]
fn experts_are_predicted_under_the_norm_of_their_input() {
    let norm = |loaded: &LoadedLayer| {
        loaded.layer.moe().and_then(|(_, input)| match input {
            Input::Residual(norm) => Some(*norm),
            Input::Bare { .. } | Input::Streams(_) | Input::Previous => None,
        })
    };
    let of_input = |sub_block: &SubBlock| match sub_block.input {
        Input::Residual(norm) => Some(norm),
        Input::Bare { .. } | Input::Streams(_) | Input::Previous => None,
    };
    let norms =
        |loaded: &LoadedLayer| loaded.layer.sub_blocks.iter().map(of_input).collect::<Vec<_>>();
    let alone = load(|p| vec![residual(&p.norm, p.mixer)]);
    assert_eq!(norm(&alone), None);
    let both = load(|p| vec![residual(&p.norm, p.mixer), parallel(p.moe)]);
    assert!(norm(&both).is_some());
    assert_eq!(norms(&both), [norm(&both), None]);
    let sequence = load(|p| vec![residual(&p.norm, p.mixer), residual(&p.norm, p.moe)]);
    assert_ne!(norms(&sequence)[0], norm(&sequence));
    assert_eq!(norms(&sequence)[1], norm(&sequence));
}

#[test]
fn a_layer_without_a_mixer_has_no_state() {
    assert_eq!(load(|p| vec![residual(&p.norm, p.mlp)]).blueprint.layers[0].states(16, 1), []);
}

#[test]
fn lists_that_cannot_run_are_recognized() {
    let is_runnable = |sub_blocks: fn(Parts, Parts) -> Vec<SubBlockBlueprint>| {
        let checkpoint = Checkpoint::embedded(&moeflux_tales::FILES).unwrap();
        let [a, b] =
            [0; 2].map(|_| Parts::take(&mut Blueprint::for_checkpoint(&checkpoint).unwrap()));
        LayerBlueprint { memory: None, sub_blocks: sub_blocks(a, b) }.is_runnable()
    };
    assert!(is_runnable(|a, b| vec![residual(&a.norm, a.mixer), parallel(b.mlp)]));
    assert!(!is_runnable(|_, _| Vec::new()));
    assert!(!is_runnable(|a, b| vec![parallel(a.mixer), residual(&b.norm, b.mlp)]));
    assert!(!is_runnable(|a, b| vec![residual(&a.norm, a.mixer), parallel(b.mixer)]));
    assert!(!is_runnable(|a, b| vec![residual(&a.norm, a.moe), residual(&b.norm, b.moe)]));
}
