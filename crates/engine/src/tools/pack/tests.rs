//! Packing with a full disk, concurrent runs, damaged copies and unsuitable folders.

mod packed_file;

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use moeflux_base::{
    Error,
    seam::{WriteTarget, write_all_at},
};
use moeflux_model::{
    checkpoint::{Checkpoint, ModelId},
    seam::JOURNAL,
};

use super::{
    packer::{pack, pack_to},
    verify::verify_packed,
};

fn go(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn golden(name: &str) -> Checkpoint {
    Checkpoint::open(&moeflux_goldens::golden(name)).unwrap()
}

/// A disk of limited space, which it optionally reports.
struct Small {
    room: AtomicU64,
    tells: bool,
}

impl WriteTarget for Small {
    fn free(&self, _: &Path) -> Option<u64> {
        self.tells.then(|| self.room.load(Ordering::Relaxed))
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        let less = |room: u64| room.checked_sub(bytes.len() as u64);
        match self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) {
            Ok(_) => write_all_at(file, bytes, offset),
            Err(_) => Err(io::ErrorKind::StorageFull.into()),
        }
    }

    fn sync(&self, _: &File) -> io::Result<()> {
        Ok(())
    }
}

fn small(room: u64, tells: bool) -> Small {
    Small { room: room.into(), tells }
}

/// All files of a folder, by name.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut all: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into(), fs::read(entry.path()).unwrap()))
        .collect();
    all.sort();
    all
}

#[test]
fn a_disk_that_fills_up_loses_no_progress() {
    let (source, temp) =
        (Checkpoint::embedded(&moeflux_tales::FILES).unwrap(), tempfile::tempdir().unwrap());
    let (whole, out) = (temp.path().join("whole"), temp.path().join("out"));
    let bytes = pack(&source, &whole, &mut go).unwrap().bytes;
    let mut failures = 0;
    let mut reused = 0;
    // Each run has a little more space than it needs to make progress.
    for _ in 0..100 {
        match pack_to(&small(bytes / 3, false), &source, &out, &mut go) {
            Ok(report) => {
                reused = report.reused;
                break;
            }
            Err(error) => {
                let said = error.to_string();
                assert!(
                    matches!(&error, Error::File { source, .. } if source.kind() == io::ErrorKind::StorageFull)
                );
                assert!(
                    said.contains("disk is full") && said.contains("same command again"),
                    "{said}"
                );
                assert!(
                    files(&out)
                        .iter()
                        .all(|(name, _)| name.extension().is_some_and(|e| e == "partial"))
                );
                let said = Checkpoint::open(&out).unwrap_err().to_string();
                assert!(said.contains("not packed yet"), "{said}");
                failures += 1;
            }
        }
    }
    assert!(failures >= 2 && reused > bytes / 2, "{failures} {reused}");
    assert!(files(&out) == files(&whole));
}

#[test]
fn packing_does_not_start_without_enough_space() {
    let (source, temp) = (golden("qwen3_moe"), tempfile::tempdir().unwrap());
    let out = temp.path().join("out");
    let said = pack_to(&small(10_000, true), &source, &out, &mut go).unwrap_err().to_string();
    assert!(said.contains("too few") && said.contains("10.0 KB are free"), "{said}");
    assert!(!out.exists());
    // Existing pieces need no space.
    let whole = pack(&source, &temp.path().join("whole"), &mut go).unwrap().bytes;
    let mut most = |done: u64, total: u64| match done * 4 > total * 3 {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    };
    let cancelled = pack_to(&small(u64::MAX, true), &source, &out, &mut most).unwrap_err();
    assert!(matches!(cancelled, Error::Cancelled));
    let report = pack_to(&small(whole / 2, true), &source, &out, &mut go).unwrap();
    assert!(report.reused > whole / 2);
}

#[test]
fn a_run_that_wrote_no_piece_can_be_resumed() {
    let (source, temp) = (golden("qwen3_moe"), tempfile::tempdir().unwrap());
    let out = temp.path().join("out");
    // Space for the first line of the journal, and for no piece.
    let said = pack_to(&small(20, false), &source, &out, &mut go).unwrap_err().to_string();
    assert!(said.contains("disk is full"), "{said}");
    let left = files(&out);
    assert!(left.len() > 1);
    let said = pack_to(&small(10_000, true), &source, &out, &mut go).unwrap_err().to_string();
    assert!(said.contains("too few"), "{said}");
    assert!(files(&out) == left);
    pack(&source, &out, &mut go).unwrap();
    assert_eq!(verify_packed(&out, Some(&source), &mut go).unwrap().damages, []);
}

#[test]
fn folders_with_other_files_are_not_changed() {
    let (source, temp) = (golden("qwen3_moe"), tempfile::tempdir().unwrap());
    let refused = |source: &Checkpoint, out: &Path, part: &str| {
        let before = files(out);
        let said = pack(source, out, &mut go).unwrap_err().to_string();
        assert!(
            said.contains(part) && said.contains(out.to_str().unwrap()),
            "{part:?} is not in {said:?}"
        );
        assert!(files(out) == before);
    };
    let folder = |name: &str| {
        let path = temp.path().join(name);
        fs::create_dir(&path).unwrap();
        path
    };
    let other = folder("other");
    fs::write(other.join("notes.txt"), "mine").unwrap();
    refused(&source, &other, "holds files");
    refused(&source, source.folder(), "holds a model");

    let out = folder("out");
    pack(&source, &out, &mut go).unwrap();
    refused(&source, &out, "holds a model");
    let packed = Checkpoint::open(&out).unwrap();
    let said = pack(&packed, &folder("again"), &mut go).unwrap_err().to_string();
    assert!(said.contains("packed already"), "{said}");

    // A partial copy of one model is not resumed as another one.
    let part = folder("part");
    let mut once = |_, _| ControlFlow::Break(());
    assert!(matches!(pack(&source, &part, &mut once), Err(Error::Cancelled)));
    refused(&golden("qwen3_moe_shards"), &part, "part of another model");
    fs::write(part.join(JOURNAL), "nonsense").unwrap();
    assert_eq!(pack(&source, &part, &mut go).unwrap().reused, 0);
    assert!(files(&part) == files(&out));
}

#[test]
fn concurrent_runs_into_one_folder_are_refused() {
    let (source, temp) = (golden("qwen3_moe"), tempfile::tempdir().unwrap());
    let out = temp.path().join("out");
    let mut second = None;
    let mut start = |_, _| {
        second.get_or_insert_with(|| pack(&source, &out, &mut go));
        ControlFlow::Continue(())
    };
    pack(&source, &out, &mut start).unwrap();
    let said = second.unwrap().unwrap_err().to_string();
    assert!(said.contains("another moeflux"), "{said}");
    assert_eq!(verify_packed(&out, Some(&source), &mut go).unwrap().damages, []);
}

#[test]
fn all_damage_is_listed() {
    let (source, temp) = (golden("deepseek_v3_hub"), tempfile::tempdir().unwrap());
    let out = temp.path().join("out");
    pack(&source, &out, &mut go).unwrap();
    let change = |name: &str, at: usize| {
        let path = out.join(name);
        let mut bytes = fs::read(&path).unwrap();
        bytes[at] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let place = |layer: usize, expert: usize| {
        let blueprint =
            moeflux_model::blueprint::Blueprint::for_checkpoint(&Checkpoint::open(&out).unwrap())
                .unwrap();
        let moe = blueprint.layers[layer].moe().unwrap();
        moe.experts.segments(expert).next().unwrap()
    };
    let last = golden("deepseek_v3_hub");
    let last = moeflux_model::blueprint::Blueprint::for_checkpoint(&last).unwrap().layers.len() - 1;
    let [a, b] = [place(last, 0), place(last, 2)];
    change("experts.moeflux", b.offset as usize + b.bytes - 1);
    change("experts.moeflux", a.offset as usize);
    change("model.safetensors", 5000);
    change("config.json", 0);
    let damages = verify_packed(&out, None, &mut go).unwrap().damages;
    let found: Vec<_> =
        damages.iter().map(|d| (d.path.file_name().unwrap().to_str().unwrap(), d.expert)).collect();
    let experts = "experts.moeflux";
    assert_eq!(
        found,
        [
            ("config.json", None),
            ("model.safetensors", None),
            (experts, Some((last, 0))),
            (experts, Some((last, 2)))
        ]
    );
    assert_eq!((damages[3].offset, damages[3].bytes), (b.offset, b.bytes as u64));

    fs::remove_file(out.join("model.safetensors")).unwrap();
    let damages = verify_packed(&out, None, &mut go).unwrap().damages;
    assert!(damages.iter().any(|d| d.path.ends_with("model.safetensors")) && damages.len() == 4);
    let said = verify_packed(&out, Some(&golden("deepseek_v3")), &mut go).unwrap_err().to_string();
    assert!(said.contains("not packed from"), "{said}");
    let said = verify_packed(source.folder(), None, &mut go).unwrap_err().to_string();
    assert!(said.contains("not packed"), "{said}");
}

#[test]
fn a_source_with_other_weights_differs() {
    let temp = tempfile::tempdir().unwrap();
    let (other, out) = (temp.path().join("other"), temp.path().join("out"));
    fs::create_dir(&other).unwrap();
    let source = golden("qwen3_moe");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(source.folder().join(name), other.join(name)).unwrap();
    }
    pack(&Checkpoint::open(&other).unwrap(), &out, &mut go).unwrap();
    let mut bytes = fs::read(other.join("model.safetensors")).unwrap();
    let end = bytes.len();
    bytes[end - 40_000..].fill(7);
    fs::write(other.join("model.safetensors"), bytes).unwrap();
    let changed = Checkpoint::open(&other).unwrap();
    let damages = verify_packed(&out, Some(&changed), &mut go).unwrap().damages;
    assert!(
        !damages.is_empty()
            && damages.iter().all(|d| d.problem.contains("differs from the source"))
    );
}

#[test]
fn a_packed_copy_is_the_same_model() {
    let names = [
        "qwen3_moe",
        "qwen3_moe_shards",
        "deepseek_v3_hub",
        "deepseek_v3_hub_fp8",
        "gpt_oss_mxfp4",
    ];
    let mut all = BTreeSet::new();
    for name in names {
        let (source, temp) = (golden(name), tempfile::tempdir().unwrap());
        let out = temp.path().join("out");
        pack(&source, &out, &mut go).unwrap();
        let id = source.identity().unwrap();
        assert_eq!(Checkpoint::open(&out).unwrap().identity().unwrap(), id, "{name}");
        assert_eq!(serde_json::from_str::<ModelId>(&format!("\"{id}\"")).unwrap(), id);
        all.insert(id.to_string());
    }
    assert_eq!(all.len(), names.len(), "different models have different identities");
    for text in ["", "0", "zz", "é0", &"0".repeat(63), &"0".repeat(66)] {
        assert!(serde_json::from_value::<ModelId>(text.into()).is_err(), "{text}");
    }
}
