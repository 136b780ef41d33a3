//! Keys of grouped-query attention, and of windows in some layers.

use moeflux_base::Error;
use serde_json::{Value, json};

use super::{
    key,
    row::{KeyRow, group, integer, reads, size, uniform, writes},
    writer::{KeyValue, KeyWriter, Place},
};
use crate::{
    blueprint::GqaShape,
    checkpoint::gguf::keys::{Config, Keys, add},
};

/// Heads that all layers have in common.
pub(crate) const HEADS: &[KeyRow] = &[
    uniform("num_attention_heads", "attention.head_count").needed(),
    group(Place::Heads, read_kv_heads, write_kv_heads),
];

/// Heads of other families, in files.
pub(crate) const WRITTEN_HEADS: KeyRow = writes(Place::Heads, write_kv_heads);

/// Share of a head that RoPE rotates.
pub(crate) const ROTATED_SHARE: KeyRow = reads(|keys, config| {
    let share = rotated_share(keys, head_width(keys)?)?;
    config.insert("partial_rotary_factor".into(), share.into());
    Ok(())
});

/// Share of a head of `width` elements that RoPE rotates: all without the key.
pub(crate) fn rotated_share(keys: &Keys<'_>, width: u64) -> Result<f64, Error> {
    let rotated = keys.integer(key::ROTATED)?.unwrap_or(width);
    Ok(rotated as f64 / width as f64)
}

/// Key width and KV heads of a config that states them once for all layers.
pub(crate) struct ConfigHeads {
    pub(crate) width: u32,
    pub(crate) kv_heads: u32,
}

impl ConfigHeads {
    pub(crate) fn of(keys: &KeyWriter<'_>) -> Self {
        let heads = keys.size("num_attention_heads").max(1);
        let width = keys.integer("head_dim").unwrap_or(keys.size("hidden_size") / heads);
        Self { width, kv_heads: keys.integer("num_key_value_heads").unwrap_or(heads) }
    }
}

fn read_kv_heads(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let heads = keys.uniform_size(key::HEADS)?;
    let (key, value) = (keys.integer(key::KEY_WIDTH)?, keys.integer(key::VALUE_WIDTH)?);
    if key != value {
        return Err(keys.problem(key::VALUE_WIDTH, "differs from key_length"));
    }
    let entries = json!({
        "num_key_value_heads": keys.uniform(key::KV_HEADS)?.unwrap_or(heads),
        "head_dim": key,
    });
    add(config, entries);
    Ok(())
}

fn write_kv_heads(keys: &mut KeyWriter<'_>) {
    let ConfigHeads { width, kv_heads } = ConfigHeads::of(keys);
    let share = keys.config["partial_rotary_factor"]
        .as_f64()
        .or(keys.config["rope_parameters"]["partial_rotary_factor"].as_f64());
    let rotated = share.map(|share| (f64::from(width) * share) as u32);
    let rotated = keys.integer("rotary_dim").or(rotated);
    let rotated = rotated.or(keys.integer("qk_rope_head_dim")).unwrap_or(width);
    keys.push(key::KV_HEADS, KeyValue::U32(kv_heads));
    keys.push(key::KEY_WIDTH, KeyValue::U32(width));
    keys.push(key::VALUE_WIDTH, KeyValue::U32(width));
    keys.push(key::ROTATED, KeyValue::U32(rotated));
}

/// Elements of a key.
pub(crate) fn head_width(keys: &Keys<'_>) -> Result<u64, Error> {
    match keys.integer(key::KEY_WIDTH)? {
        Some(_) => keys.size(key::KEY_WIDTH),
        None => {
            let heads = keys.uniform_size(key::HEADS)?;
            Ok(keys.size(key::HIDDEN)? / heads.max(1))
        }
    }
}

/// Heads whose numbers and rotated parts differ between layers.
pub(crate) fn write_heads_by_layer(keys: &mut KeyWriter<'_>) {
    let shapes = || keys.attentions().map(|gqa| gqa.shape);
    let numbers = |of: fn(GqaShape) -> usize| {
        let all: Vec<i32> = shapes().map(|shape| of(shape) as i32).collect();
        match all.first() {
            Some(first) if all.iter().all(|n| n == first) => KeyValue::U32(*first as u32),
            _ => KeyValue::I32s(all),
        }
    };
    let written = [
        (key::HEADS, numbers(|shape| shape.heads)),
        (key::KV_HEADS, numbers(|shape| shape.kv_heads)),
        (key::KEY_WIDTH, numbers(|shape| shape.head_dim)),
        (key::VALUE_WIDTH, numbers(|shape| shape.v_head_dim)),
    ];
    written.into_iter().for_each(|(name, value)| keys.push(name, value));
}

/// Rotated elements of a head in full layers and in layers with windows.
pub(crate) fn write_rotated_by_kind(keys: &mut KeyWriter<'_>) {
    for (name, slides) in [(key::ROTATED, false), (key::SLIDING_ROTATED, true)] {
        let of_kind = keys.attentions().find(|gqa| gqa.shape.window.is_some() == slides);
        if let Some(gqa) = of_kind {
            keys.push_integer(name, 2 * gqa.rope.frequencies.len());
        }
    }
}

/// Layer of full attention among `n` layers in a row, of which the others have windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FullLayer {
    First,
    Last,
}

/// Whether each layer has a window, where files without the key mean all but one of every `n`.
pub(crate) fn slides(keys: &Keys<'_>, n: u64, full: FullLayer) -> Result<Vec<bool>, Error> {
    if keys.is_array(key::WINDOW_PATTERN) {
        let flags = keys.per_layer(key::WINDOW_PATTERN)?.unwrap_or_default();
        return Ok(flags.into_iter().map(|flag| flag != 0).collect());
    }
    let n = keys.integer(key::WINDOW_PATTERN)?.unwrap_or(n).max(1);
    let place = if full == FullLayer::First { 0 } else { n - 1 };
    Ok((0..keys.layers()? as u64).map(|layer| layer % n != place).collect())
}

/// Names of the kinds of layers.
pub(crate) fn layer_types(slides: &[bool]) -> Vec<&'static str> {
    let name = |slides| if slides { "sliding_attention" } else { "full_attention" };
    slides.iter().map(|slides| name(*slides)).collect()
}

/// Width of windows.
pub(crate) const WINDOW: KeyRow = size("sliding_window", "attention.sliding_window");

/// Width of windows that no layer needs.
pub(crate) const UNREAD_WINDOW: KeyRow =
    integer("sliding_window", "attention.sliding_window").unread();

/// Windows in all but the last of every four layers, where the file has no list.
pub(crate) const WINDOWS_BEFORE_FULL: &[KeyRow] = &[
    WINDOW,
    group(
        Place::Layers,
        |keys, config| read_kinds(keys, config, 4, FullLayer::Last),
        write_pattern,
    ),
];

/// Windows in all but the first of every four layers, where the file has no list.
pub(crate) const WINDOWS_AFTER_FULL: &[KeyRow] = &[
    WINDOW,
    group(
        Place::Layers,
        |keys, config| read_kinds(keys, config, 4, FullLayer::First),
        write_pattern,
    ),
];

/// Adds the kinds of layers, with one of every `n` of full attention where the file has no list.
pub(crate) fn read_kinds(
    keys: &Keys<'_>,
    config: &mut Config,
    n: u64,
    full: FullLayer,
) -> Result<(), Error> {
    add(config, json!({"layer_types": layer_types(&slides(keys, n, full)?)}));
    Ok(())
}

/// Whether each layer has a window.
pub(crate) const PATTERN_OF_LAYERS: KeyRow = writes(Place::Layers, write_pattern);

pub(crate) fn write_pattern(keys: &mut KeyWriter<'_>) {
    let slides: Vec<bool> = keys.attentions().map(|gqa| gqa.shape.window.is_some()).collect();
    if slides.contains(&true) {
        keys.push(key::WINDOW_PATTERN, KeyValue::Bools(slides));
    }
}

/// RoPE by kind of layer, in place of RoPE of the whole model: full layers have the usual keys,
/// layers with windows another base and no scaling.
pub(crate) const ROPE_BY_TYPE: KeyRow = reads(|keys, config| {
    let share = |name: &str| -> Result<Option<f64>, Error> {
        let Some(rotated) = keys.integer(name)? else { return Ok(None) };
        Ok(Some(rotated as f64 / head_width(keys)? as f64))
    };
    let base = config.remove("rope_theta");
    let mut full = match config.remove("rope_scaling") {
        Some(Value::Object(scaling)) => scaling,
        _ => Config::new(),
    };
    let rotated = share(key::ROTATED)?;
    add(&mut full, json!({"rope_theta": base, "partial_rotary_factor": rotated}));
    let mut sliding = Config::new();
    let entries = json!({
        "rope_type": "default",
        "rope_theta": keys.number(key::SLIDING_ROPE_BASE)?.map(Value::from).or(base),
        "partial_rotary_factor": share(key::SLIDING_ROTATED)?,
    });
    add(&mut sliding, entries);
    let entries = json!({"full_attention": full, "sliding_attention": sliding});
    add(config, json!({ "rope_parameters": entries }));
    Ok(())
});
