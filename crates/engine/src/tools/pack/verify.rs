//! Reads a packed folder again and compares it with what was packed.

use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use super::{
    job::{Job, file_of},
    pool::{digest_of, each},
};
use crate::{
    base::error::Error,
    checkpoint::{
        Checkpoint, DataFile, digest,
        packed::{DENSE, Digests, EXPERTS, PackedHeader, PackedPart},
    },
};

/// What is not as it was packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file.
    pub path: PathBuf,
    /// Layer and number of the expert, if it is one.
    pub expert: Option<(usize, usize)>,
    /// First byte of the piece that was compared.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
    /// What is wrong.
    pub problem: String,
}

/// What a comparison found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyReport {
    /// Experts that were compared.
    pub experts: usize,
    /// Bytes that were compared.
    pub bytes: u64,
    /// What is wrong, in the order of the files. Empty when nothing is.
    pub damages: Vec<Damage>,
}

/// Reads all files of a packed folder and compares their digests; with `source` also byte for byte with the checkpoint that
/// was packed.
///
/// `progress` is told the bytes that are done and that there are; breaking there cancels.
///
/// # Errors
/// The folder is not packed, the header of its experts cannot be believed, or `source` is another checkpoint or cannot be
/// read; cancelled.
pub fn verify_packed(
    folder: &Path,
    source: Option<&Checkpoint>,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<VerifyReport, Error> {
    let path = folder.join(EXPERTS);
    if !path.exists() {
        let problem =
            format!("there is no {EXPERTS} here: this model is not packed, or not to its end");
        return Err(Error::Checkpoint { path: folder.into(), problem });
    }
    let experts = DataFile::open(&path)?;
    let (mut header, data) = PackedHeader::read(&experts)?;
    let job = source.map(Job::of).transpose()?;
    if let Some(job) = &job
        && !same_layout(&job.header, &header)
    {
        return Err(Error::Checkpoint {
            path: folder.into(),
            problem: format!(
                "this was not packed from {}, or by another version of moeflux",
                source.map_or(Path::new("it"), Checkpoint::folder).display()
            ),
        });
    }
    let mut damages = small_files(folder, &header, job.as_ref());
    let dense = match DataFile::open(&folder.join(DENSE)) {
        Ok(dense) if dense.len() == header.dense.bytes => Some(dense),
        other => {
            damages.push(Damage {
                path: folder.join(DENSE),
                expert: None,
                offset: 0,
                bytes: header.dense.bytes,
                problem: match other {
                    Ok(dense) => {
                        format!("it has {} bytes, {} were packed", dense.len(), header.dense.bytes)
                    }
                    Err(error) => error.to_string(),
                },
            });
            None
        }
    };

    let mut places = header.extents(data);
    places.retain(|p| dense.is_some() || matches!(p.part, PackedPart::Expert { .. }));
    let wanted: Vec<u64> = places.iter().map(|p| *header.digest(p.part)).collect();
    let total = places.iter().map(|p| p.padded_bytes).sum();
    let mut done = 0;
    let mut found = Vec::new();
    each(
        &places,
        |i, place, buffers| {
            let [buf, other] =
                buffers.two([place.bytes, job.as_ref().map_or(0, |_| place.bytes)])?;
            let file = match place.part {
                PackedPart::Dense(_) => dense.as_ref().unwrap_or(&experts),
                PackedPart::Expert { .. } => &experts,
            };
            if let Err(error) = file.read_exact_at(buf, place.offset) {
                return Ok(Some(format!("it cannot be read: {error}")));
            }
            if digest_of(place, buf) != wanted[i] {
                return Ok(Some("its digest is another one".into()));
            }
            if let Some(job) = &job {
                job.fill(place, other)?;
                if let Some(at) = buf.iter().zip(&*other).position(|(a, b)| a != b) {
                    return Ok(Some(format!(
                        "it differs from the source, first at byte {at} of it"
                    )));
                }
            }
            Ok(None)
        },
        |i, problem| {
            done += places[i].padded_bytes;
            found.extend(problem.map(|problem| (i, problem)));
            progress(done, total)
        },
    )?;
    found.sort_by_key(|(i, _)| *i);
    damages.extend(found.into_iter().map(|(i, problem)| {
        let place = places[i];
        let expert = match place.part {
            PackedPart::Dense(_) => None,
            PackedPart::Expert { entry, expert } => Some((header.layers[entry].layer, expert)),
        };
        let path = folder.join(file_of(place.part));
        Damage { path, expert, offset: place.offset, bytes: place.bytes, problem }
    }));
    Ok(VerifyReport {
        experts: header.layers.iter().map(|l| l.experts).sum(),
        bytes: done,
        damages,
    })
}

/// Whether two headers are of the same source in the same places: all but digests of contents and the small files.
fn same_layout(a: &PackedHeader, b: &PackedHeader) -> bool {
    let blank = |header: &PackedHeader| {
        let mut header = header.clone();
        header.files.clear();
        header.dense.digests = Digests(Vec::new());
        header.layers.iter_mut().for_each(|l| l.digests = Digests(Vec::new()));
        header
    };
    blank(a) == blank(b)
}

fn small_files(folder: &Path, header: &PackedHeader, job: Option<&Job<'_>>) -> Vec<Damage> {
    let mut damages = Vec::new();
    for file in &header.files {
        let path = folder.join(&file.name);
        let problem = match std::fs::read(&path) {
            Err(error) => Some(format!("it cannot be read: {error}")),
            Ok(bytes) if Digests(vec![digest(&bytes)]) != file.digest => {
                Some("it was changed since it was packed".to_owned())
            }
            Ok(bytes) => job.and_then(|job| {
                let source = job.small_files().find(|(name, _)| *name == file.name);
                let differs = source.is_none_or(|(_, source)| source != bytes);
                differs.then(|| "it differs from the source".to_owned())
            }),
        };
        let damage = |problem| Damage { path, expert: None, offset: 0, bytes: file.bytes, problem };
        damages.extend(problem.map(damage));
    }
    damages
}
