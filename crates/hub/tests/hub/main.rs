//! Downloads from a server on the loopback that has the Hub's API and its faults.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod fake_hub;
mod guests;

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use fake_hub::{COMMIT, FakeHub, Faults, tag};
use moeflux_hub::{
    Cache, HubError, ModelName, Patience, Progress, Proxies, Pull, Selection, Settings,
};
use tempfile::TempDir;

/// Bytes without a pattern that a wrong offset would keep.
fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u8
    };
    (0..len).map(|_| next()).collect()
}

struct Fixture {
    hub: FakeHub,
    folder: TempDir,
    weights: Vec<u8>,
}

impl Fixture {
    /// A model with weights of `len` bytes.
    fn new(len: usize) -> Self {
        let weights = bytes(len, 1);
        let hub = FakeHub::start(&[
            ("config.json", b"{}".to_vec()),
            ("tokenizer.json", bytes(50_000, 2)),
            ("model.safetensors", weights.clone()),
            ("empty.tiktoken", Vec::new()),
            ("README.md", b"not needed".to_vec()),
        ]);
        Self { hub, folder: tempfile::tempdir().unwrap(), weights }
    }

    fn settings(&self) -> Settings {
        Settings {
            endpoint: format!("http://{}", self.hub.address),
            token: None,
            cache: self.folder.path().join("hub"),
            offline: false,
            proxies: Proxies::default(),
        }
    }

    fn request(&self) -> Pull {
        Pull::new(self.settings(), "org/model".parse().unwrap())
    }

    fn pull(&self) -> Result<PathBuf, HubError> {
        self.request().plan(&|| false)?.run(|_| ControlFlow::Continue(()))
    }

    /// Pulls, and stops at the first report of progress that says so.
    fn pull_until(&self, stop: impl Fn(Progress) -> bool) -> Result<PathBuf, HubError> {
        self.request().plan(&|| false)?.run(|progress| match stop(progress) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        })
    }

    fn blobs(&self) -> PathBuf {
        self.folder.path().join("hub/models--org--model/blobs")
    }

    /// Asserts that the model is in the cache as the Hub's tools have it.
    fn assert_complete(&self, location: &Path) {
        let repository = self.folder.path().join("hub/models--org--model");
        assert_eq!(location, repository.join("snapshots").join(COMMIT));
        assert_eq!(fs::read(location.join("model.safetensors")).unwrap(), self.weights);
        assert_eq!(fs::read(location.join("config.json")).unwrap(), b"{}");
        assert_eq!(fs::read(location.join("empty.tiktoken")).unwrap(), b"");
        assert!(!location.join("README.md").exists());
        assert_eq!(fs::read_to_string(repository.join("refs/main")).unwrap(), COMMIT);
        let blob = repository.join("blobs").join(tag(&self.weights));
        let link = location.join("model.safetensors");
        #[cfg(unix)]
        assert_eq!(fs::canonicalize(&link).unwrap(), fs::canonicalize(&blob).unwrap());
        // Windows has hard links where users may make no others: a change of the one file shows.
        let changed = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let blob = fs::File::options().write(true).open(blob).unwrap();
        blob.set_modified(changed).unwrap();
        assert_eq!(fs::metadata(link).unwrap().modified().unwrap(), changed);
        let left = fs::read_dir(self.blobs()).unwrap().map(|entry| entry.unwrap().file_name());
        let left: Vec<_> = left.filter(|name| name.to_string_lossy().contains('.')).collect();
        assert!(left.is_empty(), "{left:?}");
    }

    fn error(&self) -> String {
        self.pull().unwrap_err().to_string()
    }

    /// Asserts that each of some faults ends a pull with one line that has these words, and that a
    /// pull without faults then succeeds.
    fn assert_refused(&self, cases: &[(Faults, &str)]) {
        for (faults, words) in cases {
            self.hub.set(faults.clone());
            let error = self.error();
            assert!(error.contains(words) && !error.contains('\n'), "{error}");
        }
        self.hub.set(Faults::default());
        self.assert_complete(&self.pull().unwrap());
    }
}

#[test]
fn a_model_is_pulled_once_and_found_again() {
    let fixture = Fixture::new(9 << 20);
    let plan = fixture.request().plan(&|| false).unwrap();
    assert_eq!((plan.file_count(), plan.missing()), (4, plan.total()));
    assert_eq!(plan.total(), (9 << 20) + 50_002);
    let location = fixture.pull().unwrap();
    fixture.assert_complete(&location);
    let sent = fixture.hub.sent();
    assert_eq!(sent, (9 << 20) + 50_002);
    // Nothing is fetched twice, and nothing is needed of the server to find it.
    fixture.assert_complete(&fixture.pull().unwrap());
    assert_eq!(fixture.hub.sent(), sent);
    assert_eq!(fixture.request().plan(&|| false).unwrap().missing(), 0);
    let cache = Cache::new(fixture.settings().cache);
    let name: ModelName = "org/model".parse().unwrap();
    let locate = |revision| cache.locate(&name.clone().at(revision).unwrap()).unwrap();
    assert_eq!(cache.locate(&name).unwrap().as_deref(), Some(location.as_path()));
    assert_eq!(locate("main").as_deref(), Some(location.as_path()));
    assert_eq!(locate(COMMIT).as_deref(), Some(location.as_path()));
    assert_eq!(locate("other"), None);
    let models = cache.models().unwrap();
    assert_eq!((models.len(), &*models[0].references), (1, &["main".to_owned()][..]));
    assert_eq!(models[0].files.len(), 4);
    assert_eq!(cache.remove(&name).unwrap(), plan_size(&fixture));
    assert!(cache.models().unwrap().is_empty());
    assert!(cache.remove(&name).unwrap_err().to_string().contains("org/model"));
}

fn plan_size(fixture: &Fixture) -> u64 {
    fixture.request().plan(&|| false).unwrap().total()
}

#[test]
fn a_pull_goes_on_after_every_break() {
    let fixture = Fixture::new(10 << 20);
    fixture.hub.set(Faults { breaks_after: Some(700_000), ..Faults::default() });
    fixture.assert_complete(&fixture.pull().unwrap());
    // A connection loses less than a block at each break.
    let (size, breaks) = (plan_size(&fixture), fixture.hub.requests() as u64);
    assert!(fixture.hub.sent() <= size + breaks * (256 << 10), "{}", fixture.hub.sent());
}

#[test]
fn a_pull_goes_on_after_every_stop() {
    let fixture = Fixture::new(24 << 20);
    let pause = Some(Duration::from_millis(10));
    fixture.hub.set(Faults { pause, ..Faults::default() });
    let mut stops = 0;
    let mut limit = 2 << 20;
    let location = loop {
        match fixture.pull_until(|progress| progress.present > limit) {
            Ok(location) => break location,
            Err(HubError::Cancelled) => stops += 1,
            Err(error) => panic!("{error}"),
        }
        let left = fixture.request().plan(&|| false).unwrap().missing();
        assert!(left < plan_size(&fixture) - (1 << 20) * stops, "{left} after {stops} stops");
        limit += 2 << 20;
    };
    assert!(stops >= 2, "{stops}");
    fixture.assert_complete(&location);
    let most = plan_size(&fixture) + stops * 8 * (4 << 20);
    assert!(fixture.hub.sent() <= most, "{} of {most}", fixture.hub.sent());
}

#[test]
fn a_busy_server_is_asked_again() {
    let fixture = Fixture::new(5 << 20);
    for status in [429, 500, 503] {
        fixture.hub.set(Faults {
            status: Some((status, fixture.hub.requests() + 3)),
            retry_after: Some(0),
            ..Faults::default()
        });
        fixture.assert_complete(&fixture.pull().unwrap());
        fs::remove_dir_all(fixture.folder.path().join("hub")).unwrap();
    }
}

#[test]
fn statuses_that_stay_end_with_one_line() {
    let fixture = Fixture::new(1 << 20);
    let file_status = |status| Faults {
        status: Some((status, usize::MAX)),
        retry_after: Some(0),
        ..Faults::default()
    };
    fixture.assert_refused(&[
        (file_status(404), "404"),
        (file_status(403), "HF_TOKEN"),
        (file_status(503), "503, 5 times"),
        (file_status(418), "418"),
        (Faults { list_status: Some(404), ..Faults::default() }, "no such model or revision"),
        (Faults { list_status: Some(401), ..Faults::default() }, "HF_TOKEN"),
        (Faults { circle: true, ..Faults::default() }, "redirects"),
    ]);
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let fixture = Fixture::new(1000);
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let settings = Settings { endpoint: format!("http://{closed}"), ..fixture.settings() };
    let since = Instant::now();
    let pull = Pull::new(settings, "org/model".parse().unwrap());
    // A cancellation ends the tries.
    let error = pull.plan(&|| since.elapsed() > Duration::from_millis(600)).unwrap_err();
    assert!(matches!(error, HubError::Cancelled), "{error}");
    assert!(since.elapsed() < Duration::from_secs(5));
}

/// Short times.
const IMPATIENCE: Patience = Patience {
    tries: 3,
    answer: Duration::from_millis(200),
    first_pause: Duration::from_millis(10),
    max_pause: Duration::from_secs(1),
};

#[test]
fn waits_are_told_and_end() {
    let fixture = Fixture::new(1000);
    let status = |status, retry_after| Faults {
        list_status: Some(status),
        retry_after,
        ..Faults::default()
    };
    let paused =
        |millis| Faults { list_pause: Some(Duration::from_millis(millis)), ..Faults::default() };
    let host = fixture.hub.address;
    for (faults, problem, words) in [
        (paused(60_000), "no answer for 0.2 s", "no answer for 0.2 s, 3 times; run"),
        (paused(20), "only ", " bytes in 0.2 s, 3 times; run"),
        (status(503, None), "status 503", "status 503, 3 times"),
        (status(429, Some(0)), "too many requests", "status 429, 3 times: too many requests;"),
    ] {
        fixture.hub.set(faults);
        let told = Arc::new(Mutex::new(Vec::new()));
        let teller = Arc::clone(&told);
        let pull = fixture.request().patience(IMPATIENCE);
        let pull = pull.on_wait(move |wait| teller.lock().unwrap().push(wait.to_string()));
        let error = pull.plan(&|| false).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        let told = told.lock().unwrap();
        let start = format!("waiting for {host}: {problem}");
        assert!(told.iter().all(|line| line.starts_with(&start)), "{told:?}");
        let tries = told.iter().map(|line| line.split_once("; ").unwrap().1);
        let tries: Vec<_> = tries.map(|line| &line[.."next try (2 of 3) in ".len()]).collect();
        assert_eq!(tries, ["next try (2 of 3) in ", "next try (3 of 3) in "]);
    }
    // It is not asked before the time that it names.
    fixture.hub.set(status(429, Some(3600)));
    let error = fixture.request().plan(&|| false).unwrap_err().to_string();
    assert!(error.contains("asks for a pause of 3600 s: too many requests"), "{error}");
}

#[test]
fn a_wait_for_an_answer_can_be_cancelled() {
    let fixture = Fixture::new(1000);
    fixture.hub.set(Faults { list_pause: Some(Duration::from_secs(60)), ..Faults::default() });
    let since = Instant::now();
    let cancelled = fixture.request().plan(&|| since.elapsed() > Duration::from_millis(100));
    assert!(matches!(cancelled, Err(HubError::Cancelled)), "{cancelled:?}");
    assert!(since.elapsed() < Duration::from_secs(5));
}

#[test]
fn redirects_are_followed_without_the_token() {
    let fixture = Fixture::new(12 << 20);
    let cdn = FakeHub::start(&[
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", bytes(50_000, 2)),
        ("model.safetensors", fixture.weights.clone()),
    ]);
    cdn.serve_any_path();
    fixture.hub.set(Faults {
        redirect: Some(cdn.address),
        token: Some("hf_secret".into()),
        ..Faults::default()
    });
    let error = fixture.error();
    assert!(error.contains("401") && error.contains("HF_TOKEN"), "{error}");
    let settings = Settings { token: Some("hf_secret".into()), ..fixture.settings() };
    let pull = Pull::new(settings, "org/model".parse().unwrap());
    let location = pull.plan(&|| false).unwrap().run(|_| ControlFlow::Continue(())).unwrap();
    fixture.assert_complete(&location);
    assert!(!cdn.has_leaked_token());
    // The hub is asked for the place of a file, not for each of its ranges.
    assert!(fixture.hub.requests() <= 2 + 8, "{}", fixture.hub.requests());
}

#[test]
fn pages_in_the_place_of_answers_are_told() {
    let fixture = Fixture::new(5 << 20);
    let portal = FakeHub::start(&[]);
    portal.set(Faults { pages: Some("/login"), ..Faults::default() });
    let page = |start| Faults { pages: Some(start), ..Faults::default() };
    let list =
        |text: &str| Faults { list: Some(text.as_bytes().to_vec().into()), ..Faults::default() };
    let redirect = |path: &str| {
        let location = format!("http://{}{path}", portal.address);
        (Faults { list_location: Some(location.clone()), ..Faults::default() }, location)
    };
    let ((to_page, login), (to_nothing, gone)) = (redirect("/login?to=x"), redirect("/gone"));
    fixture.assert_refused(&[
        (page("/api/"), "?blobs=true, got an HTML page: a captive portal"),
        (page("/org/"), "expected a file from http://"),
        (list("\n<!DOCTYPE html>"), "expected JSON from http://"),
        (list("{"), "expected JSON: EOF"),
        (to_page, &format!("got an HTML page of {login}: a captive portal")),
        (to_nothing, &format!("got status 404 of {gone}: a captive portal")),
        (Faults { list_status: Some(511), ..Faults::default() }, "a captive portal"),
    ]);
}

#[test]
fn a_relative_redirect_with_an_address_in_its_query_stays_at_the_server() {
    let fixture = Fixture::new(1000);
    let moved = "/api/models/org/model/revision/main?from=https://other.invalid/x";
    fixture.hub.set(Faults { list_location: Some(moved.into()), ..Faults::default() });
    fixture.assert_complete(&fixture.pull().unwrap());
}

#[test]
fn plain_http_goes_through_a_proxy() {
    let fixture = Fixture::new(9 << 20);
    let proxy = format!("http://us%65r:secret@{}", fixture.hub.address);
    let value = |name: &str| (name == "HTTP_PROXY").then(|| proxy.clone());
    let settings = Settings {
        endpoint: "http://hub.invalid".into(),
        proxies: Proxies::new(value),
        ..fixture.settings()
    };
    let plan = || Pull::new(settings.clone(), "org/model".parse().unwrap()).plan(&|| false);
    fixture
        .hub
        .set(Faults { proxy_authorization: Some("Basic dXNlcjpzZWNyZXQ="), ..Faults::default() });
    fixture.assert_complete(&plan().unwrap().run(|_| ControlFlow::Continue(())).unwrap());
    assert_eq!(fixture.hub.proxied(), fixture.hub.requests() + 1);
    fixture.hub.set(Faults { proxy_authorization: Some("Basic other"), ..Faults::default() });
    let error = plan().unwrap_err().to_string();
    let named = format!("the proxy {} of HTTP_PROXY refuses", fixture.hub.address);
    assert!(error.contains(&named) && error.contains("407"), "{error}");
    assert!(!error.contains("secret"), "{error}");
}

#[test]
fn a_server_without_ranges_sends_whole_files() {
    let fixture = Fixture::new(9 << 20);
    fixture.hub.set(Faults { ignores_ranges: true, ..Faults::default() });
    fixture.assert_complete(&fixture.pull().unwrap());
}

#[test]
fn lies_about_lengths_are_told() {
    let fixture = Fixture::new(9 << 20);
    fixture.assert_refused(&[
        (Faults { list_size_error: 5, ..Faults::default() }, "changed on the server"),
        (Faults { range_size_error: 5, ..Faults::default() }, "changed on the server"),
        (Faults { range_start_error: 5, ..Faults::default() }, "Content-Range"),
        (Faults { list_size_error: 1 << 60, ..Faults::default() }, "no file is so large"),
        (Faults { list_size_error: 1 << 42, ..Faults::default() }, "are free"),
    ]);
}

#[test]
fn wrong_bytes_are_deleted() {
    let fixture = Fixture::new(5 << 20);
    fixture.hub.set(Faults { flips_bytes: true, ..Faults::default() });
    let error = fixture.error();
    assert!(error.contains("git hash") || error.contains("SHA-256"), "{error}");
    fixture.hub.set(Faults::default());
    fixture.assert_complete(&fixture.pull().unwrap());
}

#[test]
fn wrong_bytes_of_a_stopped_pull_are_fetched_again() {
    let fixture = Fixture::new(20 << 20);
    let pause = Some(Duration::from_millis(10));
    fixture.hub.set(Faults { pause, ..Faults::default() });
    let stopped = fixture.pull_until(|progress| progress.present > 4 << 20);
    assert!(matches!(stopped, Err(HubError::Cancelled)), "{stopped:?}");
    let part = fixture.blobs().join(tag(&fixture.weights)).with_extension("moeflux-part");
    let mut bytes = fs::read(&part).unwrap();
    bytes.iter_mut().for_each(|byte| *byte ^= 1);
    fixture.hub.set(Faults::default());
    // The connections of the stopped pull may write until they end.
    eventually(|| {
        fs::write(&part, &bytes).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        fs::read(&part).unwrap() == bytes
    });
    fixture.assert_complete(&fixture.pull().unwrap());
}

#[test]
fn a_file_that_changes_is_not_mixed() {
    let fixture = Fixture::new(20 << 20);
    fixture.hub.set(Faults { changes_after: Some(4), ..Faults::default() });
    let error = fixture.error();
    assert!(error.contains("changed on the server"), "{error}");
    fixture.hub.set(Faults::default());
    fixture.assert_complete(&fixture.pull().unwrap());
}

#[test]
fn files_without_a_digest_in_the_list_are_asked_for() {
    let fixture = Fixture::new(5 << 20);
    fixture.hub.set(Faults { bare_list: true, ..Faults::default() });
    fixture.assert_complete(&fixture.pull().unwrap());
}

#[test]
fn names_outside_of_the_cache_are_refused() {
    let fixture = Fixture::new(1000);
    for name in ["../../evil", "/etc/passwd", "a/../../b", "C:\\evil", "a\u{0}b", ""] {
        let listed_name = Some(name.to_owned());
        fixture.hub.set(Faults { listed_name, ..Faults::default() });
        assert!(matches!(fixture.pull(), Err(HubError::FilePath { .. })), "{name:?}");
    }
    assert!(!fixture.folder.path().join("hub").exists());
}

#[test]
fn names_that_nothing_needs_do_not_matter() {
    let pull = |names: &[&str]| {
        let files = names.iter().map(|name| (*name, b"{}".to_vec()));
        let hub = FakeHub::start(&files.collect::<Vec<_>>());
        let folder = tempfile::tempdir().unwrap();
        Fixture { hub, folder, weights: Vec::new() }.pull()
    };
    let needed = ["config.json", "model.safetensors"];
    pull(&[&needed[..], &["docs/what?.md", "../readme.md", "a\u{0}b"]].concat()).unwrap();
    let refused = pull(&[&needed[..], &["../tokenizer.json"]].concat()).unwrap_err();
    assert!(matches!(refused, HubError::FilePath { .. }), "{refused}");
}

#[test]
fn without_a_network_no_server_is_asked() {
    let fixture = Fixture::new(1000);
    let settings = Settings { offline: true, ..fixture.settings() };
    let error = Pull::new(settings, "org/model".parse().unwrap()).plan(&|| false).unwrap_err();
    assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
    assert_eq!(fixture.hub.requests(), 0);
}

#[test]
fn chosen_files_and_revisions_are_pulled_alone() {
    let fixture = Fixture::new(1 << 20);
    let selection = Selection::patterns(vec!["*.md".into()]);
    let name = format!("org/model@{COMMIT}").parse().unwrap();
    let pull = Pull::new(fixture.settings(), name).selection(selection);
    let location = pull.plan(&|| false).unwrap().run(|_| ControlFlow::Continue(())).unwrap();
    assert_eq!(fs::read(location.join("README.md")).unwrap(), b"not needed");
    assert_eq!(fs::read_dir(&location).unwrap().count(), 1);
    // A commit is no reference.
    assert!(!fixture.folder.path().join("hub/models--org--model/refs").exists());
    let selection = Selection::patterns(vec!["*.bin".into()]);
    let error = fixture.request().selection(selection).plan(&|| false).unwrap_err().to_string();
    assert!(error.contains("*.bin") && error.contains("model.safetensors"), "{error}");
}

#[test]
fn shards_are_those_of_the_index_which_is_read_from_the_cache() {
    let index = br#"{"weight_map": {"x": "model-1.safetensors"}}"#.to_vec();
    let hub = FakeHub::start(&[
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", bytes(20_000, 3)),
        ("consolidated.safetensors", bytes(20_000, 3)),
    ]);
    let fixture = Fixture { hub, ..Fixture::new(0) };
    let location = fixture.pull().unwrap();
    assert!(location.join("model-1.safetensors").exists());
    assert!(!location.join("consolidated.safetensors").exists());
    let requests = fixture.hub.requests();
    assert_eq!(fixture.pull().unwrap(), location);
    assert_eq!(fixture.hub.requests(), requests);
    // The loader says what is wrong with an index of another form.
    let index = ("model.safetensors.index.json", b"[]".to_vec());
    let hub = FakeHub::start(&[index, ("model-1.safetensors", bytes(20_000, 3))]);
    let fixture = Fixture { hub, ..Fixture::new(0) };
    let location = fixture.pull().unwrap();
    assert!(location.join("model-1.safetensors").exists());
}

#[test]
fn lists_beyond_their_bounds_are_refused() {
    let fixture = Fixture::new(1000);
    let list = |list: String| Faults { list: Some(list.into_bytes().into()), ..Faults::default() };
    let files = vec![r#"{"rfilename": "x"}"#; 200_000].join(",");
    fixture.assert_refused(&[
        (
            list(format!(r#"{{"sha": "{COMMIT}", "siblings": [{files}]}}"#)),
            "/api/models/org/model/revision/main?blobs=true: expected at most 100000 files",
        ),
        (list(" ".repeat((64 << 20) + 1)), "expected at most 67108864 bytes of JSON, got 67108865"),
    ]);
}

#[test]
fn two_pulls_at_once_fetch_once() {
    let fixture = Fixture::new(16 << 20);
    let pause = Some(Duration::from_millis(1));
    fixture.hub.set(Faults { pause, ..Faults::default() });
    std::thread::scope(|scope| {
        let pulls: Vec<_> = (0..2).map(|_| scope.spawn(|| fixture.pull().unwrap())).collect();
        for pull in pulls {
            fixture.assert_complete(&pull.join().unwrap());
        }
    });
    assert_eq!(fixture.hub.sent(), plan_size(&fixture));
}

/// Waits for a condition that another thread brings about.
fn eventually(mut is_true: impl FnMut() -> bool) {
    let since = Instant::now();
    while !is_true() {
        assert!(since.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_model_is_read_while_it_arrives() {
    let fixture = Fixture::new(40 << 20);
    let plan = fixture.request().plan(&|| false).unwrap();
    let download = plan.stream(|_| ControlFlow::Continue(())).unwrap();
    // All but the tensors is there.
    assert_eq!(fs::read(download.location().join("config.json")).unwrap(), b"{}");
    assert_eq!(download.received(), 50_002);
    let files = download.arriving();
    let [file] = &files[..] else { panic!("{files:?}") };
    assert_eq!((&file.path, file.len), (&download.location().join("model.safetensors"), 40 << 20));
    assert!(!file.path.exists() && file.path.parent().unwrap().exists());
    let read = |offset: usize, len: usize| {
        let mut bytes = vec![0; len];
        let read = file.read_at(&mut bytes, offset as u64).unwrap();
        assert_eq!(bytes[..read], fixture.weights[offset..offset + read]);
        read
    };
    // The blocks of 4 KiB around each range come, and nothing else.
    std::thread::scope(|scope| {
        for offset in [5 << 20, 9 << 20, (30 << 20) + 77] {
            scope.spawn(move || assert_eq!(read(offset, 100_000), 100_000));
        }
    });
    assert_eq!(read((40 << 20) - 10, 100), 10);
    assert_eq!(file.read_at(&mut [0; 9], 40 << 20).unwrap(), 0);
    let received = download.received();
    assert!((350_012..350_012 + 4 * (8 << 10)).contains(&received), "{received}");
    // Expected ranges come without a reader.
    file.expect(&[1 << 20..2 << 20, 20 << 20..21 << 20]);
    eventually(|| download.received() >= received + (2 << 20));
    assert_eq!(download.received(), received + (2 << 20));
    assert_eq!(read(1 << 20, 1 << 20), 1 << 20);
    download.fetch_rest();
    eventually(|| file.path.exists());
    assert_eq!(read(35 << 20, 5 << 20), 5 << 20);
    assert_eq!(download.received(), plan_size(&fixture));
    let location = download.finish(|_| ControlFlow::Continue(())).unwrap();
    fixture.assert_complete(&location);
}

#[test]
fn files_of_equal_contents_are_fetched_once() {
    let weights = bytes(1 << 20, 1);
    let names = ["config.json", "generation_config.json", "a.safetensors", "b.safetensors"];
    let files = names.map(|name| match name.ends_with("json") {
        true => (name, b"{}".to_vec()),
        false => (name, weights.clone()),
    });
    let hub = FakeHub::start(&files);
    let fixture = Fixture { hub, folder: tempfile::tempdir().unwrap(), weights };
    let plan = || fixture.request().plan(&|| false).unwrap();
    assert_eq!((plan().file_count(), plan().total()), (4, (1 << 20) + 2));
    let download = plan().stream(|progress| {
        assert!(!progress.waits);
        ControlFlow::Continue(())
    });
    let download = download.unwrap();
    let arriving = download.arriving();
    let mut paths = arriving.iter().map(|file| file.path.file_name().unwrap().to_owned());
    assert!(paths.by_ref().eq(["a.safetensors", "b.safetensors"]));
    for file in &arriving {
        let mut read = vec![0; 100];
        file.read_at(&mut read, 5000).unwrap();
        assert_eq!(read, fixture.weights[5000..5100]);
    }
    let folder = download.finish(|_| ControlFlow::Continue(())).unwrap();
    for (name, bytes) in files {
        assert_eq!(fs::read(folder.join(name)).unwrap(), bytes, "{name}");
    }
    assert_eq!(plan().missing(), 0);
    assert_eq!(fixture.hub.sent(), (1 << 20) + 2);
}

#[test]
fn a_read_is_not_kept_waiting_by_the_rest() {
    let fixture = Fixture::new(200 << 20);
    let pause = Some(Duration::from_millis(5));
    fixture.hub.set(Faults { pause, ..Faults::default() });
    let plan = fixture.request().plan(&|| false).unwrap();
    let download = plan.stream(|_| ControlFlow::Continue(())).unwrap();
    download.fetch_rest();
    eventually(|| download.received() > 4 << 20);
    let since = download.received();
    let mut bytes = [0; 100];
    download.arriving()[0].read_at(&mut bytes, 190 << 20).unwrap();
    assert_eq!(bytes, fixture.weights[190 << 20..][..100]);
    // Two of eight connections are free for it.
    assert!(download.received() - since < 4 << 20, "{}", download.received() - since);
}

#[test]
fn reads_fail_with_the_download() {
    let fixture = Fixture::new(20 << 20);
    let stream = || {
        let plan = fixture.request().plan(&|| false).unwrap();
        plan.stream(|_| ControlFlow::Continue(())).unwrap()
    };
    let download = stream();
    let file = download.arriving().remove(0);
    let denied = Some((403, usize::MAX));
    fixture.hub.set(Faults { status: denied, ..Faults::default() });
    let error = file.read_at(&mut [0; 9], 1 << 20).unwrap_err().to_string();
    assert!(error.contains("403") && error.contains("HF_TOKEN"), "{error}");
    let error = download.finish(|_| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(error, HubError::Denied { .. }), "{error}");
    // A download that is dropped leaves no reader waiting.
    fixture.hub.set(Faults::default());
    let download = stream();
    fixture.hub.set(Faults { pause: Some(Duration::from_secs(60)), ..Faults::default() });
    let file = download.arriving().remove(0);
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || file.read_at(&mut [0; 200_000], 1 << 20));
        std::thread::sleep(Duration::from_millis(50));
        drop(download);
        let error = reader.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("stopped"), "{error}");
    });
}

#[test]
fn a_server_goes_on_after_errors_of_its_download() {
    let fixture = Fixture::new(20 << 20);
    let plan = fixture.request().plan(&|| false).unwrap();
    let download = plan.stream(|_| ControlFlow::Continue(())).unwrap();
    let file = download.arriving().remove(0);
    fixture.hub.set(Faults { status: Some((403, usize::MAX)), ..Faults::default() });
    let mut errors = 0;
    let finish = move || {
        let path = download.finish_in_time(|error| {
            assert!(matches!(error, HubError::Denied { .. }), "{error}");
            errors += 1;
            Duration::from_millis(10)
        });
        (path, errors)
    };
    let finished = std::thread::spawn(finish);
    let mut bytes = [0; 1000];
    let error = file.read_at(&mut bytes, 8 << 20).unwrap_err().to_string();
    assert!(error.contains("403"), "{error}");
    fixture.hub.set(Faults::default());
    eventually(|| file.read_at(&mut bytes, 8 << 20).is_ok());
    assert_eq!(bytes, fixture.weights[8 << 20..][..1000]);
    let (path, errors) = finished.join().unwrap();
    assert!(errors > 0);
    assert!(file.check().unwrap());
    fixture.assert_complete(&path.unwrap());
}

#[test]
fn bytes_without_their_digest_are_told_to_readers_and_fetched_again() {
    let fixture = Fixture::new(9 << 20);
    let plan = fixture.request().plan(&|| false).unwrap();
    let download = plan.stream(|_| ControlFlow::Continue(())).unwrap();
    let file = download.arriving().remove(0);
    fixture.hub.set(Faults { flips_bytes: true, ..Faults::default() });
    let mut bytes = [0; 1000];
    file.read_at(&mut bytes, 8 << 20).unwrap();
    assert!(!file.check().unwrap());
    fixture.hub.set(Faults::default());
    let mut errors = Vec::new();
    let path = download.finish_in_time(|error| {
        errors.push(error.to_string());
        let read = file.read_at(&mut bytes, 8 << 20).unwrap_err().to_string();
        assert_eq!(read, file.check().unwrap_err().to_string());
        assert_eq!(read, error.to_string());
        Duration::ZERO
    });
    assert!(errors.len() == 1 && errors[0].contains("model.safetensors"), "{errors:?}");
    // Bytes that were read stay wrong, also when the file has come.
    assert!(file.check().is_err() && file.read_at(&mut bytes, 8 << 20).is_err());
    fixture.assert_complete(&path.unwrap());
}

#[test]
fn a_server_without_ranges_is_read_in_its_order() {
    let fixture = Fixture::new(9 << 20);
    fixture.hub.set(Faults { ignores_ranges: true, ..Faults::default() });
    let plan = fixture.request().plan(&|| false).unwrap();
    let download = plan.stream(|_| ControlFlow::Continue(())).unwrap();
    let mut bytes = [0; 1000];
    download.arriving()[0].read_at(&mut bytes, 8 << 20).unwrap();
    assert_eq!(bytes, fixture.weights[8 << 20..][..1000]);
    fixture.assert_complete(&download.finish(|_| ControlFlow::Continue(())).unwrap());
}
