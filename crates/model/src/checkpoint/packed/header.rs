//! Header of `experts.moeflux`: encoding, reading and validation.

use moeflux_base::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::super::{
    data_file::DataFile,
    frame::{ALIGN, Frame, FrameError},
    limits::{MAX_JSON, TEXT_FILES},
    safetensors,
};

/// Name of the file of experts.
pub const EXPERTS: &str = "experts.moeflux";
/// Name of the file of dense tensors.
pub const DENSE: &str = "model.safetensors";
/// Name of the journal of an unfinished pack: digests of the data written so far.
pub const JOURNAL: &str = "pack.partial";

/// Bytes of the file of dense tensors per digest.
pub const DENSE_PART: u64 = 4 << 20;

const FRAME: Frame = Frame { magic: *b"MOEFLUXE", version: 1, oldest: 1, max_header: MAX_JSON };

/// Header of a file of packed experts.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedHeader {
    /// `model_type`.
    pub architecture: String,
    pub source: Origin,
    /// Source tensors that the records were made from.
    pub tensors: Vec<ExpertTensor>,
    /// Layers with routed experts.
    pub layers: Vec<PackedLayer>,
    pub dense: DenseFile,
    /// The small files.
    pub files: Vec<SmallFile>,
}

/// Identity of the packed source: SHA-256 digests in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Of config.json.
    pub config: String,
    /// Of the sorted lines `name dtype [shape]` of all tensors.
    pub tensors: String,
}

/// A source tensor whose contents are in the records.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertTensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
}

/// Records of a layer.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedLayer {
    /// Index among all layers.
    pub layer: usize,
    /// Number of experts.
    pub experts: usize,
    /// Bytes of one expert.
    pub bytes: u64,
    /// Human-readable description of an expert's matrices.
    pub matrices: Vec<String>,
    /// See [`layout_digest`](crate::packed_experts::layout_digest).
    pub order: Digests,
    pub digests: Digests,
}

/// `model.safetensors`.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DenseFile {
    pub bytes: u64,
    /// One per 4 MiB.
    pub digests: Digests,
}

/// A small file.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmallFile {
    pub name: String,
    pub bytes: u64,
    pub digest: Digests,
}

/// Digests, serialized as one string of hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digests(pub Vec<u64>);

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

/// Part of a packed model's files with a separate digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackedPart {
    /// Part of the file of dense tensors, by index.
    Dense(usize),
    /// A record.
    Expert {
        /// Index into [`PackedHeader::layers`].
        entry: usize,
        /// Index of the expert.
        expert: usize,
    },
}

/// Location of a part.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedExtent {
    pub part: PackedPart,
    /// Offset of the first byte in its file.
    pub offset: u64,
    pub bytes: u64,
    /// Bytes occupied in the file, zero padding included.
    pub padded_bytes: u64,
}

impl PackedLayer {
    /// Bytes from one record to the next.
    pub(crate) fn stride(&self) -> Option<u64> {
        self.bytes.checked_next_multiple_of(ALIGN)
    }

    /// Bytes of all records of the layer, padding included.
    fn padded_bytes(&self) -> Option<u64> {
        self.stride()?.checked_mul(self.experts as u64)
    }
}

impl PackedHeader {
    /// Encodes the start of the file, up to the first record.
    pub fn encode(&self) -> Result<Vec<u8>, Error> {
        FRAME.encode(self).map_err(|e| {
            Error::internal(format!(
                "the header of {EXPERTS} cannot be written: {e}; please report this"
            ))
        })
    }

    /// Reads the header and checks it against the length of the file. Returns it with the offset
    /// of the first record.
    ///
    /// # Errors
    /// The file cannot be read, has another type or version, is cut short, or contradicts itself.
    pub fn read(file: &DataFile) -> Result<(Self, u64), Error> {
        let path = file.path();
        let bad = |problem: String| Error::Checkpoint {
            path: path.to_owned(),
            problem: format!(
                "{problem}; pack the model again, or copy the file again from an intact copy"
            ),
        };
        let len = file.len();
        let (header, end) = FRAME.read::<Self>(file).map_err(|e| match e {
            FrameError::Unreadable(e) => {
                Error::file(path, "cannot read the header of the packed experts")(e)
            }
            FrameError::Foreign => bad("this is no file of packed experts".into()),
            FrameError::Version(version) => Error::Checkpoint {
                path: path.to_owned(),
                problem: format!(
                    "it has version {version}, this program reads {}: use the version of moeflux \
                     that packed it, or pack the model again",
                    FRAME.version
                ),
            },
            FrameError::Claims { json, align } => bad(format!(
                "its header claims {json} bytes and records at multiples of {align}, in a file of \
                 {len}"
            )),
            FrameError::Short => {
                bad(format!("it is cut short: it ends after {len} bytes, within its header"))
            }
            FrameError::Damaged => bad("its header is damaged: the digest does not match".into()),
            FrameError::Header(e) => bad(format!("its header is not that of packed experts: {e}")),
        })?;
        let data = end.next_multiple_of(ALIGN);
        header.check(data, len).map_err(bad)?;
        Ok((header, data))
    }

    /// Checks the sizes against each other and against the length of the file.
    fn check(&self, data: u64, len: u64) -> Result<(), String> {
        let mut end = Some(data);
        let mut record_bytes = Some(0u64);
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
            end = end.zip(l.padded_bytes()).and_then(|(end, bytes)| end.checked_add(bytes));
            record_bytes = record_bytes
                .zip(l.bytes.checked_mul(l.experts as u64))
                .and_then(|(n, b)| n.checked_add(b));
        }
        if end != Some(len) {
            let end = end.map_or("beyond any file".into(), |end| format!("at byte {end}"));
            return Err(format!(
                "its last record ends {end}, the file at {len}: it is cut short, or damaged"
            ));
        }
        let tensor_bytes = self.tensors.iter().try_fold(0u64, |n, t| {
            let size = safetensors::size(&t.dtype, &t.shape);
            size.and_then(|size| n.checked_add(size)).ok_or_else(|| {
                format!(
                    "the tensor {} of type {} and shape {:?} is impossible",
                    t.name, t.dtype, t.shape
                )
            })
        })?;
        if record_bytes != Some(tensor_bytes) {
            return Err(format!("its tensors have {tensor_bytes} bytes, its records do not"));
        }
        if self.dense.bytes.div_ceil(DENSE_PART) != self.dense.digests.0.len() as u64 {
            return Err(format!(
                "it has {} digests for the {} bytes of {DENSE}",
                self.dense.digests.0.len(),
                self.dense.bytes
            ));
        }
        let known = |f: &SmallFile| TEXT_FILES.contains(&f.name.as_str()) && f.digest.0.len() == 1;
        match self.files.iter().find(|f| !known(f)) {
            Some(f) => Err(format!("it has no valid digest for the small file {:?}", f.name)),
            None => Ok(()),
        }
    }

    /// Extents of all parts, dense tensors first, with the records from offset `data` on.
    pub fn extents(&self, data: u64) -> Vec<PackedExtent> {
        let dense_offsets = (0..self.dense.bytes).step_by(DENSE_PART as usize).enumerate();
        let dense = dense_offsets.map(|(i, offset)| {
            let bytes = DENSE_PART.min(self.dense.bytes - offset);
            PackedExtent { part: PackedPart::Dense(i), offset, bytes, padded_bytes: bytes }
        });
        let mut extents: Vec<_> = dense.collect();
        let mut offset = data;
        for (entry, l) in self.layers.iter().enumerate() {
            let padded_bytes = l.stride().unwrap_or(l.bytes);
            for expert in 0..l.experts {
                extents.push(PackedExtent {
                    part: PackedPart::Expert { entry, expert },
                    offset,
                    bytes: l.bytes,
                    padded_bytes,
                });
                offset += padded_bytes;
            }
        }
        extents
    }

    /// Digest of a part.
    pub fn digest(&mut self, part: PackedPart) -> &mut u64 {
        match part {
            PackedPart::Dense(i) => &mut self.dense.digests.0[i],
            PackedPart::Expert { entry, expert } => &mut self.layers[entry].digests.0[expert],
        }
    }
}
