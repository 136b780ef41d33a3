use std::{
    ffi::OsStr,
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use moeflux_base::allocated;
use moeflux_model::checkpoint::ModelId;

use super::*;
use crate::session::snapshot::snapshot::tests::{Saved, images, names};

fn open(limit: u64) -> (tempfile::TempDir, SnapshotFolder) {
    let temp = tempfile::tempdir().unwrap();
    let folder = SnapshotFolder::open(temp.path().join("sessions"), limit).unwrap();
    (temp, folder)
}

fn save(folder: &SnapshotFolder, tokens: &[u32]) -> PathBuf {
    let saved = Saved::new(tokens);
    let path = folder.path_for(&expected(), tokens);
    saved.save(&path);
    path
}

fn expected() -> SnapshotRequirements {
    Saved::new(&[1]).expectation()
}

/// Sets the time of last use, in seconds since the epoch.
fn used(path: &Path, seconds: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
}

#[test]
fn the_longest_prefix_is_found() {
    let (_temp, folder) = open(u64::MAX);
    let find = |tokens: &[u32], truncatable| folder.find(&expected(), tokens, truncatable);
    assert_eq!(find(&[1, 2], true), None);
    let [one, two, three, other] =
        [&[1, 2][..], &[1, 2, 3, 4], &[1, 2, 3, 4, 5, 6], &[9, 9, 9, 9, 9, 9, 9, 9]]
            .map(|t| save(&folder, t));
    save(&folder, &[]);
    let wanted = |path: &PathBuf, n| Some((path.clone(), n));
    assert_eq!(find(&[1, 2, 3, 4, 5], false), wanted(&two, 4));
    assert_eq!(find(&[1, 2, 3, 4, 5], true), wanted(&three, 5));
    assert_eq!(find(&[1, 2, 3, 4], false), wanted(&two, 4));
    // Ties: the shorter one.
    assert_eq!(find(&[1, 2, 3, 4], true), wanted(&two, 4));
    assert_eq!(find(&[1, 2, 7], true), wanted(&one, 2));
    assert_eq!(find(&[1, 3], true).unwrap().1, 1);
    assert_eq!(find(&[1, 3], false), None);
    assert_eq!(find(&[9], true), wanted(&other, 1));
    assert_eq!(find(&[9], false), None);
    assert_eq!(find(&[2], true), None);
    assert_eq!(find(&[], true), None);

    // Without logits, a state that cannot be truncated must leave a token to compute.
    let silent = folder.path_for(&expected(), &[7, 8]);
    Saved { logits: None, ..Saved::new(&[7, 8]) }.save(&silent);
    assert_eq!(find(&[7, 8], false), None);
    assert_eq!(find(&[7, 8], true), wanted(&silent, 2));
    assert_eq!(find(&[7, 8, 9], false), wanted(&silent, 2));

    // The same tokens with an image.
    let tokens = vec![1, 2, 3, 4, 5];
    let seen = Saved { contents: images(&[3]), ..Saved::new(&tokens) };
    let key = PrefixKey { tokens: &tokens, contents: &seen.contents };
    let path = folder.path_for(&expected(), key);
    assert_ne!(path, folder.path_for(&expected(), &tokens));
    seen.save(&path);
    assert_eq!(folder.find(&expected(), key, false), wanted(&path, 5));
    assert_eq!(find(&tokens, false), wanted(&two, 4));
    fs::remove_file(&path).unwrap();

    // Damage to the header or tokens is skipped; states are not checked.
    let change = |path: &Path, at: usize| {
        let mut bytes = fs::read(path).unwrap();
        let at = if at == 0 { bytes.len() - 1 } else { at };
        bytes[at] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    change(&two, 0);
    assert_eq!(find(&[1, 2, 3, 4], false), wanted(&two, 4));
    change(&two, 4096);
    assert_eq!(find(&[1, 2, 3, 4], false), wanted(&one, 2));
    fs::write(&one, "something else").unwrap();
    assert_eq!(find(&[1, 2, 3, 4], false), None);
    let model = SnapshotRequirements { model: ModelId([8; 32]), ..expected() };
    assert_eq!(folder.find(&model, &[9], true), None);
    let exact = SnapshotRequirements { exact: false, ..expected() };
    assert_eq!(folder.find(&exact, &[9], true), None);
}

#[test]
fn equal_sessions_have_equal_paths() {
    let (_temp, folder) = open(0);
    let place = |expected: &SnapshotRequirements, tokens: &[u32]| folder.path_for(expected, tokens);
    // The shape of a state counts, but not the number of entries that the context allows.
    let other = |change: fn(&mut SavedState)| {
        let mut expected = expected();
        change(&mut expected.states[1]);
        place(&expected, &[1, 2])
    };
    let all = [
        place(&expected(), &[1, 2]),
        other(|state| state.shape += ", the last 512"),
        other(|state| state.entry_bytes += 1),
        place(&expected(), &[2, 1]),
        place(&expected(), &[]),
        place(&SnapshotRequirements { exact: false, ..expected() }, &[1, 2]),
        place(&SnapshotRequirements { kv_format: "q8".into(), ..expected() }, &[1, 2]),
        place(&SnapshotRequirements { model: ModelId([8; 32]), ..expected() }, &[1, 2]),
    ];
    for (i, path) in all.iter().enumerate() {
        assert!(path.starts_with(&folder.path) && !all[..i].contains(path));
        assert_eq!(path.extension(), Some(OsStr::new(SUFFIX)));
    }
    assert_eq!(all[0], place(&expected(), &[1, 2]));
    assert_eq!(all[0], other(|state| state.entries += 1));
    assert!(all[0].file_name().unwrap().to_str().unwrap().starts_with("0707070707070707-2-"));
}

#[test]
fn the_least_recently_used_snapshot_is_evicted() {
    let (_temp, folder) = open(u64::MAX);
    let all: Vec<_> = (1..6).map(|n| save(&folder, &[n])).collect();
    let bytes = allocated(&fs::metadata(&all[0]).unwrap());
    all.iter().zip([50, 10, 40, 20, 30]).for_each(|(path, seconds)| used(path, seconds));
    // Files that are not snapshots stay, whatever their names.
    let stays = ["notes.txt", "0.moeflux-session", "1.moeflux-session", ".x.partial"];
    for name in stays {
        fs::write(
            folder.path.join(name),
            if name.starts_with('1') { "MOEFLUXE too" } else { "mine" },
        )
        .unwrap();
        used(&folder.path.join(name), 1);
    }
    fs::create_dir(folder.path.join("2.moeflux-session")).unwrap();
    let partial =
        format!(".{}.0123456789abcdef.partial", all[0].file_name().unwrap().to_str().unwrap());
    fs::write(folder.path.join(&partial), "").unwrap();
    let shrunk = |limit| {
        SnapshotFolder::open(&folder.path, limit).unwrap();
        assert!(stays.iter().all(|name| folder.path.join(name).exists()));
        all.iter().map(|path| path.exists()).collect::<Vec<_>>()
    };
    assert_eq!(shrunk(5 * bytes), [true; 5]);
    assert!(!names(&folder.path).contains(&partial));
    assert_eq!(shrunk(5 * bytes - 1), [true, false, true, true, true]);
    folder.touch(&all[3]);
    assert_eq!(shrunk(3 * bytes), [true, false, true, true, false]);
    assert_eq!(shrunk(bytes), [false, false, false, true, false]);
    assert_eq!(shrunk(0), [false; 5]);
    folder.touch(&all[0]);
    assert!(!all[0].exists());
    fs::remove_dir_all(&folder.path).unwrap();
    assert!(matches!(folder.shrink(), Err(Error::File { .. })));
    folder.make_anew();
    folder.shrink().unwrap();
}

#[test]
fn a_full_disk_is_said_once_and_a_removed_folder_is_made_anew() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let written = Arc::clone(&lines);
    let notices = Notices::new(move |text| written.lock().unwrap().push(text.to_owned()));
    let (_temp, folder) = open(u64::MAX);
    let folder = folder.notices(notices);
    let failed = || -> Result<(), Error> {
        Err(Error::file(&folder.path, "cannot write")(io::ErrorKind::StorageFull.into()))
    };
    (0..10).for_each(|_| folder.note_save(&failed()));
    folder.note_save(&Ok(()));
    folder.note_save(&failed());
    assert_eq!(lines.lock().unwrap().len(), 1, "{lines:?}");
    fs::remove_dir_all(&folder.path).unwrap();
    (0..3).for_each(|_| folder.make_anew());
    let path = save(&folder, &[1, 2]);
    assert_eq!(folder.find(&expected(), &[1, 2], false), Some((path, 2)));
    assert_eq!(lines.lock().unwrap().len(), 2, "{lines:?}");
}
