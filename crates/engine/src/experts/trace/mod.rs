//! Routing traces: which experts each step of a run needed, in a file.
//!
//! All numbers are little-endian. A file is
//!
//! ```text
//! 16 bytes  "moeflux routing\n"
//! u32       version, 1
//! u32       bytes of the header
//! ...       the header: one JSON object, a TraceHeader
//! ...       the steps, one after another, to the end of the file
//! ```
//!
//! and a step is
//!
//! ```text
//! u32       rows: 1 in decode, more in prefill
//! then for each layer of the header, in its order:
//! u16       n: how many experts its rows chose
//! n * u16   their ids, ascending
//! ```
//!
//! A step is written when it is finished. If the program is killed, the file ends with its last finished step, or within
//! the step after it, which readers leave out.

mod recorder;
#[cfg(test)]
pub(crate) mod tests;

use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
};

use serde::{Deserialize, Serialize};

use crate::{base::error::Error, model::blueprint::Blueprint};

pub(crate) use recorder::Recorder;

const MAGIC: [u8; 16] = *b"moeflux routing\n";
const VERSION: u32 = 1;

/// The most bytes of a header that are believed.
const MAX_HEADER: usize = 1 << 20;

/// The most experts of a model that are believed.
const MAX_EXPERTS: usize = 1 << 22;

/// What a trace was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceHeader {
    /// The name of the model's folder.
    pub model: String,
    /// `model_type` of its config.json.
    pub model_type: String,
    /// Bytes of one slot, as planned in that run.
    pub slot: u64,
    /// Bytes of everything but the slots in the memory where the slots lie, as planned in that run.
    pub fixed: u64,
    /// The layers that have routed experts, in their order.
    pub layers: Vec<TraceLayer>,
}

/// A layer that has routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceLayer {
    /// Its number in the model, from 0.
    pub layer: usize,
    /// How many it has.
    pub experts: usize,
    /// How many a token chooses.
    pub k: usize,
    /// Bytes of one on disk.
    pub bytes: u64,
}

impl TraceHeader {
    pub(crate) fn new(blueprint: &Blueprint, folder: &Path, slot: u64, fixed: u64) -> Self {
        let layers = blueprint.moe_layers().map(|(layer, moe)| TraceLayer {
            layer,
            experts: moe.experts.count,
            k: moe.router.top_k,
            bytes: moe.experts.bytes as u64,
        });
        Self {
            model: folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            model_type: blueprint.model_type.clone(),
            slot,
            fixed,
            layers: layers.collect(),
        }
    }

    /// All experts of the model.
    pub fn experts(&self) -> usize {
        self.layers.iter().map(|l| l.experts).sum()
    }

    /// What is wrong with it, if anything is.
    fn problem(&self) -> Option<String> {
        let mut before = None;
        let mut experts = 0;
        for TraceLayer { layer, experts: of_layer, k, bytes } in self.layers.iter().copied() {
            if before.is_some_and(|before| before >= layer) {
                return Some(format!("layer {layer} is out of order"));
            }
            before = Some(layer);
            if !(1..=usize::from(u16::MAX)).contains(&of_layer) || !(1..=of_layer).contains(&k) {
                return Some(format!("layer {layer} cannot choose {k} of {of_layer} experts"));
            }
            experts += of_layer;
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

/// A routing trace that has been read.
///
/// An expert's *key* is its number among all of the model: those of the first layer come first.
#[derive(Clone, Debug)]
pub struct Trace {
    header: TraceHeader,
    /// Rows of each step.
    rows: Vec<u32>,
    /// The keys that each layer of each step needs, and where they end.
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
            Problem::System(source) => Error::file(path, "cannot read the routing trace")(source),
            Problem::Content(problem) => Error::Trace {
                path: path.into(),
                problem: format!("{problem}; record the routing again with --trace"),
            },
        })
    }

    fn read(file: &mut dyn Read) -> Result<Self, Problem> {
        let content = |problem: &str| Problem::Content(problem.to_owned());
        let mut file = Input { file, at: 0 };
        let mut magic = [0; MAGIC.len()];
        if !file.fill(&mut magic)? || magic != MAGIC {
            return Err(content("this is not a routing trace"));
        }
        let cut = || content("this routing trace ends within its header");
        let version = file.u32()?.ok_or_else(cut)?;
        if version != VERSION {
            return Err(Problem::Content(format!(
                "this routing trace has version {version}, but only version {VERSION} is known here"
            )));
        }
        let bytes = file.u32()?.ok_or_else(cut)? as usize;
        if bytes > MAX_HEADER {
            return Err(Problem::Content(format!("its header cannot have {bytes} bytes")));
        }
        let mut json = vec![0; bytes];
        if !file.fill(&mut json)? {
            return Err(cut());
        }
        let header: TraceHeader = serde_json::from_slice(&json)
            .map_err(|e| Problem::Content(format!("its header is not understood: {e}")))?;
        if let Some(problem) = header.problem() {
            return Err(Problem::Content(format!("its header is damaged: {problem}")));
        }
        let mut trace = Self::empty(header);
        trace.is_cut = loop {
            let (keys, ends) = (trace.keys.len(), trace.ends.len());
            match trace.read_step(&mut file)? {
                Outcome::Step => {}
                Outcome::End => break false,
                Outcome::Cut => {
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

    fn read_step(&mut self, file: &mut Input<'_>) -> Result<Outcome, Problem> {
        let at = file.at;
        let damaged =
            |what: String| Problem::Content(format!("the step at offset {at} is damaged: {what}"));
        let mut rows = [0; 4];
        match file.some(&mut rows)? {
            0 => return Ok(Outcome::End),
            4 => {}
            _ => return Ok(Outcome::Cut),
        }
        let rows = u32::from_le_bytes(rows);
        if rows == 0 {
            return Err(damaged("it has no rows".into()));
        }
        let mut first = 0;
        let mut ids = Vec::new();
        for layer in &self.header.layers {
            let Some(n) = file.u16()? else { return Ok(Outcome::Cut) };
            let most = layer.experts.min(layer.k.saturating_mul(rows as usize));
            if !(layer.k..=most).contains(&usize::from(n)) {
                return Err(damaged(format!("{n} experts of layer {} cannot be", layer.layer)));
            }
            ids.resize(2 * usize::from(n), 0);
            if !file.fill(&mut ids)? {
                return Ok(Outcome::Cut);
            }
            let mut before = None;
            for id in ids.as_chunks().0.iter().map(|id| u16::from_le_bytes(*id)) {
                if usize::from(id) >= layer.experts || before.is_some_and(|before| before >= id) {
                    return Err(damaged(format!(
                        "expert {id} of layer {} cannot be there",
                        layer.layer
                    )));
                }
                before = Some(id);
                self.keys.push(first + u32::from(id));
            }
            self.ends.push(self.keys.len());
            first += layer.experts as u32;
        }
        self.rows.push(rows);
        Ok(Outcome::Step)
    }

    /// What it was made from.
    pub fn header(&self) -> &TraceHeader {
        &self.header
    }

    /// How many steps there are.
    pub fn steps(&self) -> usize {
        self.rows.len()
    }

    /// Tokens of all steps.
    pub fn tokens(&self) -> u64 {
        self.rows.iter().map(|rows| u64::from(*rows)).sum()
    }

    /// Whether the file ends within a step, which is left out.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// All keys, in the order in which they are needed.
    pub(crate) fn keys(&self) -> &[u32] {
        &self.keys
    }

    /// Each step: its rows, and for each layer of the header the keys that it needs.
    pub(crate) fn each_step(&self) -> impl Iterator<Item = (u32, impl Iterator<Item = &[u32]>)> {
        let layers = self.header.layers.len();
        self.rows.iter().enumerate().map(move |(step, rows)| {
            let of_layer = move |layer: usize| {
                let i = step * layers + layer;
                let from = if i == 0 { 0 } else { self.ends[i - 1] };
                &self.keys[from..self.ends[i]]
            };
            (*rows, (0..layers).map(of_layer))
        })
    }
}

enum Problem {
    System(io::Error),
    Content(String),
}

/// What became of reading a step.
enum Outcome {
    Step,
    End,
    Cut,
}

/// A file, and how far it has been read.
struct Input<'a> {
    file: &'a mut dyn Read,
    at: u64,
}

impl Input<'_> {
    /// As many bytes as there are, up to all.
    fn some(&mut self, into: &mut [u8]) -> Result<usize, Problem> {
        let mut n = 0;
        while n < into.len() {
            match self.file.read(&mut into[n..]) {
                Ok(0) => break,
                Ok(more) => n += more,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Problem::System(e)),
            }
        }
        self.at += n as u64;
        Ok(n)
    }

    /// Whether there were as many bytes.
    fn fill(&mut self, into: &mut [u8]) -> Result<bool, Problem> {
        Ok(self.some(into)? == into.len())
    }

    fn u16(&mut self) -> Result<Option<u16>, Problem> {
        let mut bytes = [0; 2];
        Ok(self.fill(&mut bytes)?.then(|| u16::from_le_bytes(bytes)))
    }

    fn u32(&mut self) -> Result<Option<u32>, Problem> {
        let mut bytes = [0; 4];
        Ok(self.fill(&mut bytes)?.then(|| u32::from_le_bytes(bytes)))
    }
}
