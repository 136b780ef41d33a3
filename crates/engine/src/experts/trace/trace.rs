//! A trace in memory, and its reader.

use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
};

use moeflux_base::Error;
use moeflux_model::blueprint::Blueprint;
use serde::{Deserialize, Serialize};

pub(super) const MAGIC: [u8; 16] = *b"moeflux routing\n";
pub(super) const VERSION: u32 = 1;

/// Maximum accepted bytes of a header.
const MAX_HEADER: usize = 1 << 20;

/// Maximum accepted experts of a model.
const MAX_EXPERTS: usize = 1 << 22;

/// Model and memory plan of the recorded run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TraceHeader {
    /// Name of the model's folder.
    pub model: String,
    /// `model_type` of its config.json.
    pub model_type: String,
    /// Bytes of one slot, as planned in that run.
    pub slot: u64,
    /// Bytes of everything but the slots in the memory that holds the slots, as planned in that
    /// run.
    pub fixed: u64,
    /// Layers with routed experts, in their order.
    pub layers: Vec<TraceLayer>,
}

/// A layer with routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TraceLayer {
    /// Index of the layer in the model, from 0.
    pub layer: usize,
    /// Number of its experts.
    pub experts: usize,
    /// Experts per token (top-k).
    pub k: usize,
    /// Bytes of one expert on disk.
    pub bytes: u64,
}

impl TraceHeader {
    pub(crate) fn new(blueprint: &Blueprint, folder: &Path, slot: u64, fixed: u64) -> Self {
        // Steps are of the model's own layers: drafts are not traced.
        let own = blueprint.moe_layers().take_while(|(layer, _)| *layer < blueprint.own_layers());
        let layers = own.map(|(layer, moe)| TraceLayer {
            layer,
            experts: moe.experts.count,
            k: moe.router.top_k,
            bytes: moe.experts.file_bytes as u64,
        });
        Self {
            model: folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            model_type: blueprint.model_type.clone(),
            slot,
            fixed,
            layers: layers.collect(),
        }
    }

    /// Number of experts in all layers.
    pub fn experts(&self) -> usize {
        self.layers.iter().map(|l| l.experts).sum()
    }

    /// Describes the first inconsistency; `None` if the header is valid.
    pub(super) fn problem(&self) -> Option<String> {
        let mut previous = None;
        let mut experts = 0;
        for TraceLayer { layer, experts: layer_experts, k, bytes } in self.layers.iter().copied() {
            if previous.is_some_and(|previous| previous >= layer) {
                return Some(format!("layer {layer} is out of order"));
            }
            previous = Some(layer);
            if !(1..=usize::from(u16::MAX)).contains(&layer_experts)
                || !(1..=layer_experts).contains(&k)
            {
                return Some(format!("layer {layer} cannot choose {k} of {layer_experts} experts"));
            }
            experts += layer_experts;
            if bytes == 0 || bytes > self.slot || bytes.checked_mul(experts as u64).is_none() {
                return Some(format!("an expert of layer {layer} cannot have {bytes} bytes"));
            }
            if experts > MAX_EXPERTS {
                return Some(format!("there cannot be more than {MAX_EXPERTS} experts"));
            }
        }
        self.layers.is_empty().then(|| "no layer has routed experts".to_owned())
    }
}

/// A routing trace, read from a file.
///
/// An expert's *key* is its index among all experts of the model, the first layer's experts first.
#[derive(Clone, Debug)]
pub struct Trace {
    header: TraceHeader,
    /// Rows of each step.
    rows: Vec<u32>,
    /// Keys needed by each layer of each step, and the end of each layer's keys.
    keys: Vec<u32>,
    ends: Vec<usize>,
    is_cut: bool,
}

impl Trace {
    /// Reads a trace. Takes a few times the file's size in memory.
    ///
    /// # Errors
    /// The file cannot be read, or is not a trace.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(Error::file(path, "cannot open the routing trace"))?;
        Self::read(&mut BufReader::new(file)).map_err(|problem| match problem {
            TraceProblem::System(source) => {
                Error::file(path, "cannot read the routing trace")(source)
            }
            TraceProblem::Content(problem) => Error::Trace {
                path: path.into(),
                problem: format!("{problem}; record the routing again with --trace"),
            },
        })
    }

    fn read(file: &mut dyn Read) -> Result<Self, TraceProblem> {
        let content = |problem: &str| TraceProblem::Content(problem.to_owned());
        let mut file = TraceInput { file, offset: 0 };
        let mut magic = [0; MAGIC.len()];
        if !file.fill(&mut magic)? || magic != MAGIC {
            return Err(content("this is not a routing trace"));
        }
        let cut = || content("this routing trace ends within its header");
        let version = file.u32()?.ok_or_else(cut)?;
        if version != VERSION {
            return Err(TraceProblem::Content(format!(
                "this routing trace has version {version}, but only version {VERSION} is known here"
            )));
        }
        let bytes = file.u32()?.ok_or_else(cut)? as usize;
        if bytes > MAX_HEADER {
            return Err(TraceProblem::Content(format!("its header cannot have {bytes} bytes")));
        }
        let mut json = vec![0; bytes];
        if !file.fill(&mut json)? {
            return Err(cut());
        }
        let header: TraceHeader = serde_json::from_slice(&json)
            .map_err(|e| TraceProblem::Content(format!("its header is not understood: {e}")))?;
        if let Some(problem) = header.problem() {
            return Err(TraceProblem::Content(format!("its header is damaged: {problem}")));
        }
        let mut trace = Self::empty(header);
        trace.is_cut = loop {
            let (keys, ends) = (trace.keys.len(), trace.ends.len());
            match trace.read_step(&mut file)? {
                StepRead::Step => {}
                StepRead::End => break false,
                StepRead::Cut => {
                    trace.keys.truncate(keys);
                    trace.ends.truncate(ends);
                    break true;
                }
            }
        };
        Ok(trace)
    }

    /// A trace without steps.
    fn empty(header: TraceHeader) -> Self {
        Self { header, rows: Vec::new(), keys: Vec::new(), ends: Vec::new(), is_cut: false }
    }

    fn read_step(&mut self, file: &mut TraceInput<'_>) -> Result<StepRead, TraceProblem> {
        let offset = file.offset;
        let damaged = |problem: String| {
            TraceProblem::Content(format!("the step at offset {offset} is damaged: {problem}"))
        };
        let mut rows = [0; 4];
        match file.read_some(&mut rows)? {
            0 => return Ok(StepRead::End),
            4 => {}
            _ => return Ok(StepRead::Cut),
        }
        let rows = u32::from_le_bytes(rows);
        if rows == 0 {
            return Err(damaged("it has no rows".into()));
        }
        let mut first = 0;
        let mut ids = Vec::new();
        for layer in &self.header.layers {
            let Some(n) = file.u16()? else { return Ok(StepRead::Cut) };
            let max_experts = layer.experts.min(layer.k.saturating_mul(rows as usize));
            if !(layer.k..=max_experts).contains(&usize::from(n)) {
                return Err(damaged(format!("{n} experts of layer {} cannot be", layer.layer)));
            }
            ids.resize(2 * usize::from(n), 0);
            if !file.fill(&mut ids)? {
                return Ok(StepRead::Cut);
            }
            let mut previous = None;
            for id in ids.as_chunks().0.iter().map(|id| u16::from_le_bytes(*id)) {
                if usize::from(id) >= layer.experts
                    || previous.is_some_and(|previous| previous >= id)
                {
                    return Err(damaged(format!(
                        "expert {id} of layer {} cannot be there",
                        layer.layer
                    )));
                }
                previous = Some(id);
                self.keys.push(first + u32::from(id));
            }
            self.ends.push(self.keys.len());
            first += layer.experts as u32;
        }
        self.rows.push(rows);
        Ok(StepRead::Step)
    }

    /// Model and memory plan of the recorded run.
    pub fn header(&self) -> &TraceHeader {
        &self.header
    }

    /// Number of steps.
    pub fn steps(&self) -> usize {
        self.rows.len()
    }

    /// Tokens of all steps.
    pub fn tokens(&self) -> u64 {
        self.rows.iter().map(|rows| u64::from(*rows)).sum()
    }

    /// Whether the file ends within a step, which is then left out.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// All keys, in the order in which they are needed.
    pub(crate) fn keys(&self) -> &[u32] {
        &self.keys
    }

    /// For each step its rows, and for each layer of the header the keys needed.
    pub(crate) fn each_step(&self) -> impl Iterator<Item = (u32, impl Iterator<Item = &[u32]>)> {
        let layers = self.header.layers.len();
        self.rows.iter().enumerate().map(move |(step, rows)| {
            let layer_keys = move |layer: usize| {
                let i = step * layers + layer;
                let start = if i == 0 { 0 } else { self.ends[i - 1] };
                &self.keys[start..self.ends[i]]
            };
            (*rows, (0..layers).map(layer_keys))
        })
    }
}

enum TraceProblem {
    System(io::Error),
    Content(String),
}

/// Result of reading a step.
enum StepRead {
    Step,
    End,
    Cut,
}

/// A file with the current offset.
struct TraceInput<'a> {
    file: &'a mut dyn Read,
    offset: u64,
}

impl TraceInput<'_> {
    /// Fills `buf` as far as the file goes; returns the bytes read.
    fn read_some(&mut self, buf: &mut [u8]) -> Result<usize, TraceProblem> {
        let mut n = 0;
        while n < buf.len() {
            match self.file.read(&mut buf[n..]) {
                Ok(0) => break,
                Ok(more) => n += more,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(TraceProblem::System(e)),
            }
        }
        self.offset += n as u64;
        Ok(n)
    }

    /// Fills `buf`; returns whether the file had enough bytes.
    fn fill(&mut self, buf: &mut [u8]) -> Result<bool, TraceProblem> {
        Ok(self.read_some(buf)? == buf.len())
    }

    fn u16(&mut self) -> Result<Option<u16>, TraceProblem> {
        let mut bytes = [0; 2];
        Ok(self.fill(&mut bytes)?.then(|| u16::from_le_bytes(bytes)))
    }

    fn u32(&mut self) -> Result<Option<u32>, TraceProblem> {
        let mut bytes = [0; 4];
        Ok(self.fill(&mut bytes)?.then(|| u32::from_le_bytes(bytes)))
    }
}
#[cfg(test)]
pub(crate) mod tests;
