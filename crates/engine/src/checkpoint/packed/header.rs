//! The header of a file of packed experts: writing it, reading it, and believing none of it unchecked.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::super::{
    MAX_JSON, Source, TEXTS,
    frame::{ALIGN, Frame, Unframed},
    safetensors,
};
use crate::base::error::Error;

/// The file of experts.
pub(crate) const EXPERTS: &str = "experts.moeflux";
/// The file of all other tensors.
pub(crate) const DENSE: &str = "model.safetensors";
/// The digests of what is written, while it is.
pub(crate) const JOURNAL: &str = "pack.partial";

/// Bytes of the file of dense tensors that have a digest of their own.
pub(crate) const PIECE: u64 = 4 << 20;

const FRAME: Frame = Frame { magic: *b"MOEFLUXE", version: 1, most: MAX_JSON };

/// What the file says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Header {
    /// `model_type`.
    pub(crate) architecture: String,
    pub(crate) source: Origin,
    /// Tensors of which the records were made.
    pub(crate) tensors: Vec<ExpertTensor>,
    /// Layers with routed experts.
    pub(crate) layers: Vec<PackedLayer>,
    pub(crate) dense: DenseFile,
    /// The small files.
    pub(crate) files: Vec<SmallFile>,
}

/// What was packed, as SHA-256 in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Origin {
    /// Of config.json.
    pub(crate) config: String,
    /// Of a line `name dtype [shape]` for each tensor, sorted.
    pub(crate) tensors: String,
}

/// A tensor of the source that is not in a file of tensors any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ExpertTensor {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
}

/// The records of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PackedLayer {
    /// Its number among all layers.
    pub(crate) layer: usize,
    /// How many experts.
    pub(crate) experts: usize,
    /// Bytes of one.
    pub(crate) bytes: u64,
    /// The matrices of one, for people.
    pub(crate) matrices: [String; 3],
    /// See [`order`](super::order).
    pub(crate) order: Digests,
    pub(crate) digests: Digests,
}

/// `model.safetensors`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DenseFile {
    pub(crate) bytes: u64,
    /// One for every 4 MiB.
    pub(crate) digests: Digests,
}

/// A small file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SmallFile {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) digest: Digests,
}

/// Digests that are written as one text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Digests(pub(crate) Vec<u64>);

impl Serialize for Digests {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{self}"))
    }
}

impl std::fmt::Display for Digests {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|digest| write!(f, "{digest:016x}"))
    }
}

impl<'de> Deserialize<'de> for Digests {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = |bytes: &[u8]| {
            let text = std::str::from_utf8(bytes).ok()?;
            let plain = text.bytes().all(|b| b.is_ascii_hexdigit()) && text.len() == 16;
            u64::from_str_radix(text, 16).ok().filter(|_| plain)
        };
        let all = text.as_bytes().chunks(16).map(digits).collect::<Option<_>>();
        all.map(Self).ok_or_else(|| de::Error::custom("digests are 16 hexadecimal digits each"))
    }
}

/// What a piece of the packed files holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// A part of the file of dense tensors, by number.
    Dense(usize),
    /// A record.
    Expert {
        /// Which entry of [`Header::layers`].
        entry: usize,
        expert: usize,
    },
}

/// Where a piece lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) piece: Piece,
    /// First byte in its file.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// Bytes that are taken in the file, zeros at the end included.
    pub(crate) taken: u64,
}

impl PackedLayer {
    /// Bytes from one record to the next one.
    pub(crate) fn stride(&self) -> Option<u64> {
        self.bytes.checked_next_multiple_of(ALIGN)
    }

    fn taken(&self) -> Option<u64> {
        self.stride()?.checked_mul(self.experts as u64)
    }
}

impl Header {
    /// The start of the file, up to where the records begin.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, Error> {
        FRAME.encode(self).map_err(|e| {
            Error::Input(format!(
                "the header of {EXPERTS} cannot be written: {e}; please report this"
            ))
        })
    }

    /// Reads the header, and where the records begin, and checks that they end where the file does.
    ///
    /// # Errors
    /// The file cannot be read, is of another kind or version, is cut short, or contradicts itself.
    pub(crate) fn read(source: &Source) -> Result<(Self, u64), Error> {
        let path = source.path();
        let bad = |problem: String| Error::Checkpoint {
            path: path.to_owned(),
            problem: format!(
                "{problem}; pack the model again, or copy the file again from where it is whole"
            ),
        };
        let len = source.len();
        let (header, end) = FRAME.read::<Self>(source).map_err(|e| match e {
            Unframed::Unreadable(e) => Error::file(path, "cannot read the header of the packed experts")(e),
            Unframed::Foreign => bad("this is no file of packed experts".into()),
            Unframed::Version(version) => Error::Checkpoint {
                path: path.to_owned(),
                problem: format!(
                    "it is of version {version}, this program reads {}: use the version of moeflux that packed it, or pack \
                     the model again",
                    FRAME.version
                ),
            },
            Unframed::Claims { json, align } => bad(format!(
                "its header claims {json} bytes and records at multiples of {align}, in a file of {len}"
            )),
            Unframed::Short => bad(format!("it is cut short: it ends after {len} bytes, before its header does")),
            Unframed::Damaged => bad("its header is damaged: the digest is another one".into()),
            Unframed::Header(e) => bad(format!("its header is not that of packed experts: {e}")),
        })?;
        let data = end.next_multiple_of(ALIGN);
        header.check(data, len).map_err(bad)?;
        Ok((header, data))
    }

    /// That its numbers agree with each other and with the length of the file.
    fn check(&self, data: u64, len: u64) -> Result<(), String> {
        let mut end = Some(data);
        let mut wanted = Some(0u64);
        for l in &self.layers {
            if l.experts == 0
                || l.bytes == 0
                || l.digests.0.len() != l.experts
                || l.order.0.len() != 1
            {
                return Err(format!(
                    "layer {} has {} digests for {} experts of {} bytes",
                    l.layer,
                    l.digests.0.len(),
                    l.experts,
                    l.bytes
                ));
            }
            end = end.zip(l.taken()).and_then(|(end, taken)| end.checked_add(taken));
            wanted = wanted
                .zip(l.bytes.checked_mul(l.experts as u64))
                .and_then(|(n, b)| n.checked_add(b));
        }
        if end != Some(len) {
            let end = end.map_or("beyond all numbers".into(), |end| format!("at byte {end}"));
            return Err(format!(
                "its last record ends {end}, the file at {len}: it is cut short, or damaged"
            ));
        }
        let tensors = self.tensors.iter().try_fold(0u64, |n, t| {
            let size = safetensors::size(&t.dtype, &t.shape);
            size.and_then(|size| n.checked_add(size)).ok_or_else(|| {
                format!(
                    "the tensor {} of type {} and shape {:?} is impossible",
                    t.name, t.dtype, t.shape
                )
            })
        })?;
        if wanted != Some(tensors) {
            return Err(format!("its tensors have {tensors} bytes, its records others"));
        }
        if self.dense.bytes.div_ceil(PIECE) != self.dense.digests.0.len() as u64 {
            return Err(format!(
                "it has {} digests for the {} bytes of {DENSE}",
                self.dense.digests.0.len(),
                self.dense.bytes
            ));
        }
        let known = |f: &SmallFile| TEXTS.contains(&f.name.as_str()) && f.digest.0.len() == 1;
        match self.files.iter().find(|f| !known(f)) {
            Some(f) => Err(format!("it has no right digest for the small file {:?}", f.name)),
            None => Ok(()),
        }
    }

    /// All pieces of a file whose records begin at `data`: first those of the dense tensors.
    pub(crate) fn places(&self, data: u64) -> Vec<Place> {
        let dense = (0..self.dense.bytes).step_by(PIECE as usize).enumerate().map(|(i, offset)| {
            let bytes = PIECE.min(self.dense.bytes - offset);
            Place { piece: Piece::Dense(i), offset, bytes, taken: bytes }
        });
        let mut all: Vec<_> = dense.collect();
        let mut offset = data;
        for (entry, l) in self.layers.iter().enumerate() {
            let taken = l.stride().unwrap_or(l.bytes);
            for expert in 0..l.experts {
                all.push(Place {
                    piece: Piece::Expert { entry, expert },
                    offset,
                    bytes: l.bytes,
                    taken,
                });
                offset += taken;
            }
        }
        all
    }

    /// The digest of a piece.
    pub(crate) fn digest(&mut self, piece: Piece) -> &mut u64 {
        match piece {
            Piece::Dense(i) => &mut self.dense.digests.0[i],
            Piece::Expert { entry, expert } => &mut self.layers[entry].digests.0[expert],
        }
    }
}
