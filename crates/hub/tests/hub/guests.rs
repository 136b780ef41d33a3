//! Two downloads of one model at once. Locks are between files that are open, so two downloads of
//! one process exclude each other as those of two processes.

use std::{
    fs::File,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use moeflux_hub::{ArrivingFile, Download};

use super::*;

const CONTINUE: ControlFlow<()> = ControlFlow::Continue(());

impl Fixture {
    fn stream(&self) -> Download {
        self.request().plan(&|| false).unwrap().stream(|_| CONTINUE).unwrap()
    }

    /// A download that has the lock of the weights, and another one.
    fn owner_and_guest(&self) -> [Download; 2] {
        let owner = self.stream();
        assert!(self.lock().try_lock().is_err());
        [owner, self.stream()]
    }

    fn lock(&self) -> File {
        let folder = self.folder.path().join("hub/.locks/models--org--model");
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join(format!("{}.lock", tag(&self.weights)));
        File::options().write(true).create(true).truncate(false).open(path).unwrap()
    }

    /// Locks the weights, as soon as a download that was dropped has ended.
    fn wait_for_lock(&self) -> File {
        let lock = self.lock();
        lock.lock().unwrap();
        lock
    }

    /// Lets a download have some bytes that are wrong.
    fn read_wrong(&self, file: &ArrivingFile) {
        self.hub.set(Faults { flips_bytes: true, ..Faults::default() });
        file.read_at(&mut [0; 9], 1 << 20).unwrap();
        self.hub.set(Faults::default());
    }

    fn assert_read(&self, file: &ArrivingFile, offset: usize, len: usize) {
        let (mut bytes, mut filled) = (vec![0; len], 0);
        while filled < len {
            filled += file.read_at(&mut bytes[filled..], (offset + filled) as u64).unwrap();
        }
        assert!(bytes == self.weights[offset..offset + len], "{len} bytes at {offset}");
    }
}

fn weights(download: &Download) -> ArrivingFile {
    download.arriving().remove(0)
}

#[test]
fn a_guest_shares_what_arrives_and_fetches_what_it_reads_earlier() {
    let fixture = Fixture::new(6 << 20);
    let first = fixture.stream();
    fixture.assert_read(&weights(&first), 1 << 20, 1 << 20);
    // It records what has arrived, and releases the lock.
    drop(first);
    fixture.wait_for_lock();
    let [owner, guest] = fixture.owner_and_guest();
    let file = weights(&guest);
    fixture.assert_read(&file, 1 << 20, 1 << 20);
    assert_eq!(guest.received(), 0);
    // Neither has this: the guest fetches it alone.
    fixture.assert_read(&file, 5 << 20, 100_000);
    file.expect(&[4 << 20..(4 << 20) + 4096, 3 << 20..(3 << 20) + 4096]);
    eventually(|| guest.received() >= 100_000 + 2 * 4096);
    // Reads go over from one file to the other.
    fixture.assert_read(&file, (2 << 20) - 10_000, 20_000);
    let fetched = guest.received();
    assert!(fetched <= 100_000 + 20_000 + 6 * 4096, "{fetched}");
    assert_eq!(owner.received(), 0);
    // A guest that stops changes nothing.
    let joined = fixture.pull_until(|progress| {
        assert!(!progress.waits);
        progress.joins
    });
    assert!(matches!(joined, Err(HubError::Cancelled)), "{joined:?}");
    let pause = Some(Duration::from_millis(5));
    fixture.hub.set(Faults { pause, ..Faults::default() });
    thread::scope(|scope| {
        scope.spawn(|| owner.finish(|_| CONTINUE).unwrap());
        let mut joins = false;
        let progress = |progress: Progress| {
            joins |= progress.joins;
            CONTINUE
        };
        fixture.assert_complete(&guest.finish(progress).unwrap());
        assert!(joins);
    });
    assert!(file.check().unwrap());
    fixture.assert_read(&file, (5 << 20) - 10_000, 50_000);
    // Nothing else is fetched twice.
    assert_eq!(fixture.hub.sent(), plan_size(&fixture) + fetched);
}

#[test]
fn a_guest_goes_on_where_the_other_process_ends() {
    let fixture = Fixture::new(6 << 20);
    let [owner, guest] = fixture.owner_and_guest();
    let file = weights(&guest);
    fixture.assert_read(&weights(&owner), 0, 1 << 20);
    fixture.assert_read(&file, 5 << 20, 1 << 20);
    assert_eq!(fixture.hub.sent(), 50_002 + (2 << 20));
    // The other one ends while a range of the guest arrives.
    let pause = Some(Duration::from_millis(10));
    fixture.hub.set(Faults { pause, ..Faults::default() });
    thread::scope(|scope| {
        let reader = scope.spawn(|| fixture.assert_read(&file, 2 << 20, 3 << 20));
        eventually(|| guest.received() > (1 << 20) + (512 << 10));
        drop(owner);
        reader.join().unwrap();
    });
    fixture.hub.set(Faults::default());
    let received = guest.received();
    fixture.assert_complete(&guest.finish(|_| CONTINUE).unwrap());
    fixture.assert_read(&file, 0, 6 << 20);
    assert!(file.check().unwrap());
    // Bytes from before are kept, but for the request at that time.
    assert!(received < 5 << 20, "{received}");
    let most = plan_size(&fixture) + (3 << 20);
    assert!(fixture.hub.sent() <= most, "{} of {most}", fixture.hub.sent());
}

#[test]
fn a_guest_learns_that_bytes_of_the_other_process_were_wrong() {
    let fixture = Fixture::new(2 << 20);
    let [owner, guest] = fixture.owner_and_guest();
    let file = weights(&guest);
    fixture.read_wrong(&weights(&owner));
    let error = owner.finish(|_| CONTINUE).unwrap_err();
    assert!(matches!(error, HubError::Digest { .. }), "{error}");
    let mut errors = Vec::new();
    let path = guest.finish_in_time(|error| {
        assert_eq!(file.check().unwrap_err().to_string(), error.to_string());
        assert!(file.read_at(&mut [0; 9], 0).is_err());
        errors.push(error.to_string());
        Duration::ZERO
    });
    assert!(errors.len() == 1 && errors[0].contains("model.safetensors"), "{errors:?}");
    fixture.assert_complete(&path.unwrap());
}

#[test]
fn a_guest_learns_that_its_own_bytes_were_wrong() {
    let fixture = Fixture::new(2 << 20);
    let [owner, guest] = fixture.owner_and_guest();
    let file = weights(&guest);
    fixture.read_wrong(&file);
    fixture.assert_complete(&owner.finish(|_| CONTINUE).unwrap());
    let error = guest.finish(|_| CONTINUE).unwrap_err();
    assert!(matches!(error, HubError::OtherBytes { .. }), "{error}");
    assert_eq!(file.check().unwrap_err().to_string(), error.to_string());
    fixture.assert_complete(&fixture.pull().unwrap());
}

#[test]
fn a_plain_pull_begins_again_where_bytes_of_the_other_process_were_wrong() {
    let fixture = Fixture::new(2 << 20);
    let owner = fixture.stream();
    let has_joined = AtomicBool::new(false);
    let progress = |progress: Progress| {
        has_joined.fetch_or(progress.joins, Ordering::Relaxed);
        false
    };
    thread::scope(|scope| {
        let pull = scope.spawn(|| fixture.pull_until(progress));
        eventually(|| has_joined.load(Ordering::Relaxed));
        fixture.read_wrong(&weights(&owner));
        owner.finish(|_| CONTINUE).unwrap_err();
        fixture.assert_complete(&pull.join().unwrap().unwrap());
    });
}

#[test]
fn other_programs_are_waited_for() {
    let fixture = Fixture::new(2 << 20);
    drop(fixture.stream());
    let lock = fixture.wait_for_lock();
    // The other program does not have the bytes of an earlier download.
    let blob = fixture.blobs().join(tag(&fixture.weights));
    assert!(blob.with_extension("moeflux-part").exists());
    let incomplete = blob.with_extension("incomplete");
    fs::write(&incomplete, b"").unwrap();
    let waited = fixture.pull_until(|progress| {
        assert!(!progress.joins);
        progress.waits
    });
    assert!(matches!(waited, Err(HubError::Cancelled)), "{waited:?}");
    drop(lock);
    fs::remove_file(incomplete).unwrap();
    fixture.assert_complete(&fixture.pull().unwrap());
}
