//! Verifies a packed folder: re-reads it and compares digests, optionally with the source.

use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use moeflux_base::Error;
use moeflux_model::{
    checkpoint::Checkpoint,
    seam::{DENSE, DataFile, Digests, EXPERTS, PackedHeader, PackedPart, digest},
};

use super::{
    pack_job::{PackJob, file_name},
    workers::{for_each_piece, piece_digest},
};

/// A difference from the packed contents.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Damage {
    /// The file.
    pub path: PathBuf,
    /// Layer and expert index, if the piece is an expert.
    pub expert: Option<(usize, usize)>,
    /// Offset of the compared piece in the file.
    pub offset: u64,
    /// Size of the piece in bytes.
    pub bytes: u64,
    /// Description of the difference.
    pub problem: String,
}

/// Result of a verification.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerifyReport {
    /// Experts compared.
    pub experts: usize,
    /// Bytes compared.
    pub bytes: u64,
    /// Differences, in file order. Empty if the folder is intact.
    pub damages: Vec<Damage>,
}

/// Reads all files of a packed folder and compares their digests; with `source`, also compares
/// every byte with the original checkpoint.
///
/// `progress` receives the bytes done and the total bytes; `Break` cancels.
///
/// # Errors
/// The folder is not packed, the header of its experts is not valid, `source` is another checkpoint
/// or cannot be read, or the call was cancelled.
pub fn verify_packed(
    folder: &Path,
    source: Option<&Checkpoint>,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<VerifyReport, Error> {
    let path = folder.join(EXPERTS);
    if !path.exists() {
        let problem =
            format!("there is no {EXPERTS} here: this model is not packed, or not completely");
        return Err(Error::Checkpoint { path: folder.into(), problem });
    }
    let experts = DataFile::open(&path)?;
    let (mut header, data) = PackedHeader::read(&experts)?;
    let job = source.map(PackJob::new).transpose()?;
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
    for_each_piece(
        &places,
        |i, place, buffers| {
            let [buf, other] =
                buffers.pair([place.bytes, job.as_ref().map_or(0, |_| place.bytes)])?;
            let file = match place.part {
                PackedPart::Dense(_) => dense.as_ref().unwrap_or(&experts),
                PackedPart::Expert { .. } => &experts,
            };
            if let Err(error) = file.read_exact_at(buf, place.offset) {
                return Ok(Some(format!("it cannot be read: {error}")));
            }
            if piece_digest(place, buf) != wanted[i] {
                return Ok(Some("its digest differs".into()));
            }
            if let Some(job) = &job {
                job.read_piece(place, other)?;
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
        let path = folder.join(file_name(place.part));
        Damage { path, expert, offset: place.offset, bytes: place.bytes, problem }
    }));
    Ok(VerifyReport {
        experts: header.layers.iter().map(|l| l.experts).sum(),
        bytes: done,
        damages,
    })
}

/// Whether two headers describe the same source and layout, ignoring digests of contents and small
/// files.
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

fn small_files(folder: &Path, header: &PackedHeader, job: Option<&PackJob<'_>>) -> Vec<Damage> {
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
