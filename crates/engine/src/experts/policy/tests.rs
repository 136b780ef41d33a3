use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::*;

#[test]
fn names_are_read_as_they_are_written() {
    for kind in PolicyKind::ALL {
        assert_eq!(kind.name().parse::<PolicyKind>().unwrap(), kind);
    }
    let error = "mru".parse::<PolicyKind>().unwrap_err().to_string();
    assert!(error.contains("\"mru\"") && error.contains("lru, s3-fifo, lfu"), "{error}");
}

const EXPERTS: usize = 24;

/// What happens to a cache.
#[derive(Clone, Copy, Debug)]
enum Event {
    Use(usize),
    Ahead(usize),
    /// Its read failed.
    Lose(usize),
    /// Of those that came ahead none is awaited any more.
    Expire,
}

fn events() -> impl Strategy<Value = Vec<(Event, u32)>> {
    let event = (0..20u8, 0..EXPERTS).prop_map(|(kind, key)| match kind {
        // Some are used more often than others.
        0..8 => Event::Use(key),
        8..16 => Event::Use(key % 5),
        16..18 => Event::Ahead(key),
        18 => Event::Lose(key),
        _ => Event::Expire,
    });
    let pinned = prop_oneof![3 => Just(0u32), 1 => any::<u32>(), 1 => Just(u32::MAX)];
    prop::collection::vec((event, pinned), 1..300)
}

/// The same by experts instead of slots, as naively as it can be said. Of a pinned expert nobody asks `free`.
trait Model {
    fn insert(&mut self, key: usize, ahead: bool);
    fn hit(&mut self, key: usize);
    fn remove(&mut self, key: usize);
    fn expire(&mut self);
    fn victim(&mut self, free: &dyn Fn(usize) -> bool) -> Option<usize>;
}

/// Runs events through both, where experts that a bit of the mask names are pinned.
fn compare(
    kind: PolicyKind,
    slots: usize,
    events: &[(Event, u32)],
    model: &mut dyn Model,
) -> Result<(), TestCaseError> {
    let mut policy = kind.policy(slots, EXPERTS);
    let mut held: Vec<Option<usize>> = vec![None; slots];
    for (event, pinned) in events {
        let free = |key: usize| pinned >> key & 1 == 0;
        let (Event::Use(key) | Event::Ahead(key) | Event::Lose(key)) = *event else {
            policy.expire();
            model.expire();
            continue;
        };
        let slot = held.iter().position(|h| *h == Some(key));
        match (event, slot) {
            (Event::Use(_), Some(slot)) => {
                policy.hit(slot);
                model.hit(key);
            }
            (Event::Lose(_), Some(slot)) => {
                policy.remove(slot);
                model.remove(key);
                held[slot] = None;
            }
            (Event::Ahead(_), Some(_)) | (Event::Lose(_), None) | (Event::Expire, _) => {}
            (Event::Use(_) | Event::Ahead(_), None) => {
                let slot = match held.iter().position(Option::is_none) {
                    Some(slot) => slot,
                    None => {
                        let victim = policy.victim(&|slot| held[slot].is_some_and(free));
                        prop_assert_eq!(victim.and_then(|slot| held[slot]), model.victim(&free));
                        let Some(victim) = victim else { continue };
                        let out = held[victim].unwrap();
                        prop_assert!(free(out), "a pinned slot was evicted");
                        policy.remove(victim);
                        model.remove(out);
                        victim
                    }
                };
                let ahead = matches!(event, Event::Ahead(_));
                policy.insert(slot, key, ahead);
                model.insert(key, ahead);
                held[slot] = Some(key);
            }
        }
    }
    Ok(())
}

/// The first that is free; those before it go to the end.
fn first_free(queue: &mut VecDeque<usize>, free: &dyn Fn(usize) -> bool) -> Option<usize> {
    let at = queue.iter().position(|key| free(*key))?;
    queue.rotate_left(at);
    Some(queue[0])
}

#[derive(Default)]
struct NaiveLru {
    used: VecDeque<usize>,
    ahead: VecDeque<usize>,
}

impl Model for NaiveLru {
    fn insert(&mut self, key: usize, ahead: bool) {
        if ahead { &mut self.ahead } else { &mut self.used }.push_back(key);
    }

    fn hit(&mut self, key: usize) {
        self.remove(key);
        self.used.push_back(key);
    }

    fn remove(&mut self, key: usize) {
        self.used.retain(|k| *k != key);
        self.ahead.retain(|k| *k != key);
    }

    fn expire(&mut self) {
        self.ahead.drain(..).for_each(|key| self.used.push_front(key));
    }

    fn victim(&mut self, free: &dyn Fn(usize) -> bool) -> Option<usize> {
        first_free(&mut self.used, free).or_else(|| first_free(&mut self.ahead, free))
    }
}

/// Experts with their uses.
type Uses = VecDeque<(usize, u8)>;

#[derive(Default)]
struct NaiveS3Fifo {
    slots: usize,
    small: Uses,
    main: Uses,
    ahead: VecDeque<usize>,
    /// Departures from the small queue, the last one first.
    ghosts: VecDeque<usize>,
}

impl NaiveS3Fifo {
    fn most_small(&self) -> usize {
        (self.slots / 10).max(1)
    }
}

impl Model for NaiveS3Fifo {
    fn insert(&mut self, key: usize, ahead: bool) {
        if ahead {
            self.ahead.push_back(key);
            return;
        }
        let ghosts = self.slots - self.most_small();
        let ghost = self.ghosts.iter().take(ghosts).any(|g| *g == key);
        // Its place among the ghosts stays empty.
        self.ghosts.iter_mut().filter(|g| **g == key).for_each(|g| *g = usize::MAX);
        if ghost { &mut self.main } else { &mut self.small }.push_back((key, 0));
    }

    fn hit(&mut self, key: usize) {
        match self.small.iter_mut().chain(&mut self.main).find(|e| e.0 == key) {
            Some((_, uses)) => *uses = (*uses + 1).min(3),
            None => {
                self.ahead.retain(|k| *k != key);
                self.insert(key, false);
            }
        }
    }

    fn remove(&mut self, key: usize) {
        if self.small.iter().any(|e| e.0 == key) {
            self.ghosts.iter_mut().filter(|g| **g == key).for_each(|g| *g = usize::MAX);
            self.ghosts.push_front(key);
        }
        self.small.retain(|e| e.0 != key);
        self.main.retain(|e| e.0 != key);
        self.ahead.retain(|k| *k != key);
    }

    fn expire(&mut self) {
        self.ahead.drain(..).for_each(|key| self.small.push_front((key, 0)));
    }

    fn victim(&mut self, free: &dyn Fn(usize) -> bool) -> Option<usize> {
        let small_first = self.small.len() >= self.most_small() || self.main.is_empty();
        for small in [small_first, !small_first] {
            // Every use is spent after three rounds; one more finds whatever is free.
            for _ in 0..=4 * if small { self.small.len() } else { self.main.len() } {
                let queue = if small { &mut self.small } else { &mut self.main };
                match queue.pop_front() {
                    Some((key, 0)) if free(key) => {
                        queue.push_front((key, 0));
                        return Some(key);
                    }
                    Some((key, 0)) => queue.push_back((key, 0)),
                    Some((key, _)) if small => self.main.push_back((key, 0)),
                    Some((key, uses)) => self.main.push_back((key, uses - 1)),
                    None => break,
                }
            }
        }
        first_free(&mut self.ahead, free)
    }
}

#[derive(Default)]
struct NaiveLfu {
    old: [usize; EXPERTS],
    recent: [usize; EXPERTS],
    uses: usize,
    /// By level, and in the order of last use.
    used: BTreeMap<usize, VecDeque<usize>>,
    ahead: VecDeque<usize>,
}

impl NaiveLfu {
    fn sort(&mut self, key: usize) {
        let level = (self.old[key] + self.recent[key]).min(63);
        self.used.entry(level).or_default().push_back(key);
    }
}

impl Model for NaiveLfu {
    fn insert(&mut self, key: usize, ahead: bool) {
        match ahead {
            true => self.ahead.push_back(key),
            false => self.hit(key),
        }
    }

    fn hit(&mut self, key: usize) {
        self.remove(key);
        self.old[key] = (self.old[key] + 1).min(64);
        self.recent[key] = (self.recent[key] + 4).min(64);
        self.sort(key);
        self.uses += 1;
        if self.uses.is_multiple_of(EXPERTS / 4) {
            self.recent.iter_mut().for_each(|n| *n /= 2);
        }
        if self.uses.is_multiple_of(EXPERTS * 8) {
            self.old.iter_mut().for_each(|n| *n /= 2);
        }
        if self.uses.is_multiple_of(EXPERTS / 4) {
            let in_order = std::mem::take(&mut self.used).into_values().flatten();
            in_order.for_each(|key| self.sort(key));
        }
    }

    fn remove(&mut self, key: usize) {
        self.used
            .values_mut()
            .chain([&mut self.ahead])
            .for_each(|queue| queue.retain(|k| *k != key));
    }

    fn expire(&mut self) {
        std::mem::take(&mut self.ahead).into_iter().for_each(|key| self.sort(key));
    }

    fn victim(&mut self, free: &dyn Fn(usize) -> bool) -> Option<usize> {
        self.used.values_mut().chain([&mut self.ahead]).find_map(|queue| first_free(queue, free))
    }
}

proptest! {
    #[test]
    fn lru_is_a_list_by_last_use(slots in 1usize..20, events in events()) {
        compare(PolicyKind::Lru, slots, &events, &mut NaiveLru::default())?;
    }

    #[test]
    fn s3_fifo_is_two_queues_and_ghosts(slots in 1usize..20, events in events()) {
        compare(PolicyKind::S3Fifo, slots, &events, &mut NaiveS3Fifo { slots, ..NaiveS3Fifo::default() })?;
    }

    #[test]
    fn lfu_is_counts_that_fade(slots in 1usize..20, events in events()) {
        compare(PolicyKind::Lfu, slots, &events, &mut NaiveLfu::default())?;
    }
}
