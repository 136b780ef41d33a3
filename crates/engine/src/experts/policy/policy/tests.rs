use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use crate::experts::policy::kind::PolicyKind;

#[test]
fn names_round_trip() {
    for kind in PolicyKind::ALL {
        assert_eq!(kind.name().parse::<PolicyKind>().unwrap(), kind);
    }
    let error = "mru".parse::<PolicyKind>().unwrap_err().to_string();
    assert!(error.contains("\"mru\"") && error.contains("lru, s3-fifo, lfu"), "{error}");
}

const EXPERTS: usize = 24;

/// CacheEvent of a cache.
#[derive(Clone, Copy, Debug)]
enum CacheEvent {
    Use(usize),
    Prefetch(usize),
    /// The read of an expert failed.
    Lose(usize),
    /// Prefetched experts lose their protection.
    Expire,
}

fn events() -> impl Strategy<Value = Vec<(CacheEvent, u32)>> {
    let event = (0..20u8, 0..EXPERTS).prop_map(|(kind, key)| match kind {
        // Some experts are used more often than others.
        0..8 => CacheEvent::Use(key),
        8..16 => CacheEvent::Use(key % 5),
        16..18 => CacheEvent::Prefetch(key),
        18 => CacheEvent::Lose(key),
        _ => CacheEvent::Expire,
    });
    let pinned = prop_oneof![3 => Just(0u32), 1 => any::<u32>(), 1 => Just(u32::MAX)];
    prop::collection::vec((event, pinned), 1..300)
}

/// Naive reference of a policy, by expert instead of slot. `evictable` is never called for pinned
/// experts.
trait NaivePolicy {
    fn insert(&mut self, key: usize, prefetched: bool);
    fn hit(&mut self, key: usize);
    fn remove(&mut self, key: usize);
    fn expire_prefetched(&mut self);
    fn victim(&mut self, evictable: &dyn Fn(usize) -> bool) -> Option<usize>;
}

/// Runs events through a policy and its reference. Experts whose bit is set in the mask are pinned.
fn compare(
    kind: PolicyKind,
    slots: usize,
    events: &[(CacheEvent, u32)],
    naive: &mut dyn NaivePolicy,
) -> Result<(), TestCaseError> {
    let mut policy = kind.create(slots, EXPERTS);
    let mut held: Vec<Option<usize>> = vec![None; slots];
    for (event, pinned) in events {
        let evictable = |key: usize| pinned >> key & 1 == 0;
        let (CacheEvent::Use(key) | CacheEvent::Prefetch(key) | CacheEvent::Lose(key)) = *event
        else {
            policy.expire_prefetched();
            naive.expire_prefetched();
            continue;
        };
        let slot = held.iter().position(|h| *h == Some(key));
        match (event, slot) {
            (CacheEvent::Use(_), Some(slot)) => {
                policy.hit(slot);
                naive.hit(key);
            }
            (CacheEvent::Lose(_), Some(slot)) => {
                policy.remove(slot);
                naive.remove(key);
                held[slot] = None;
            }
            (CacheEvent::Prefetch(_), Some(_))
            | (CacheEvent::Lose(_), None)
            | (CacheEvent::Expire, _) => {}
            (CacheEvent::Use(_) | CacheEvent::Prefetch(_), None) => {
                let slot = match held.iter().position(Option::is_none) {
                    Some(slot) => slot,
                    None => {
                        let victim = policy.victim(&|slot| held[slot].is_some_and(evictable));
                        prop_assert_eq!(
                            victim.and_then(|slot| held[slot]),
                            naive.victim(&evictable)
                        );
                        let Some(victim) = victim else { continue };
                        let out = held[victim].unwrap();
                        prop_assert!(evictable(out), "a pinned slot was evicted");
                        policy.remove(victim);
                        naive.remove(out);
                        victim
                    }
                };
                let prefetched = matches!(event, CacheEvent::Prefetch(_));
                policy.insert(slot, key, prefetched);
                naive.insert(key, prefetched);
                held[slot] = Some(key);
            }
        }
    }
    Ok(())
}

/// The first evictable expert; those before it move to the end.
fn first_evictable(
    queue: &mut VecDeque<usize>,
    evictable: &dyn Fn(usize) -> bool,
) -> Option<usize> {
    let index = queue.iter().position(|key| evictable(*key))?;
    queue.rotate_left(index);
    Some(queue[0])
}

#[derive(Default)]
struct NaiveLru {
    used: VecDeque<usize>,
    prefetched: VecDeque<usize>,
}

impl NaivePolicy for NaiveLru {
    fn insert(&mut self, key: usize, prefetched: bool) {
        if prefetched { &mut self.prefetched } else { &mut self.used }.push_back(key);
    }

    fn hit(&mut self, key: usize) {
        self.remove(key);
        self.used.push_back(key);
    }

    fn remove(&mut self, key: usize) {
        self.used.retain(|k| *k != key);
        self.prefetched.retain(|k| *k != key);
    }

    fn expire_prefetched(&mut self) {
        self.prefetched.drain(..).for_each(|key| self.used.push_front(key));
    }

    fn victim(&mut self, evictable: &dyn Fn(usize) -> bool) -> Option<usize> {
        first_evictable(&mut self.used, evictable)
            .or_else(|| first_evictable(&mut self.prefetched, evictable))
    }
}

/// Experts with their use counts.
type CountedQueue = VecDeque<(usize, u8)>;

#[derive(Default)]
struct NaiveS3Fifo {
    slots: usize,
    small: CountedQueue,
    main: CountedQueue,
    prefetched: VecDeque<usize>,
    /// Departures from the small queue, the last one first.
    ghosts: VecDeque<usize>,
}

impl NaiveS3Fifo {
    fn max_small(&self) -> usize {
        (self.slots / 10).max(1)
    }
}

impl NaivePolicy for NaiveS3Fifo {
    fn insert(&mut self, key: usize, prefetched: bool) {
        if prefetched {
            self.prefetched.push_back(key);
            return;
        }
        let ghosts = self.slots - self.max_small();
        let ghost = self.ghosts.iter().take(ghosts).any(|g| *g == key);
        // Its entry in the ghost queue stays empty.
        self.ghosts.iter_mut().filter(|g| **g == key).for_each(|g| *g = usize::MAX);
        if ghost { &mut self.main } else { &mut self.small }.push_back((key, 0));
    }

    fn hit(&mut self, key: usize) {
        match self.small.iter_mut().chain(&mut self.main).find(|e| e.0 == key) {
            Some((_, uses)) => *uses = (*uses + 1).min(3),
            None => {
                self.prefetched.retain(|k| *k != key);
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
        self.prefetched.retain(|k| *k != key);
    }

    fn expire_prefetched(&mut self) {
        self.prefetched.drain(..).for_each(|key| self.small.push_front((key, 0)));
    }

    fn victim(&mut self, evictable: &dyn Fn(usize) -> bool) -> Option<usize> {
        let small_first = self.small.len() >= self.max_small() || self.main.is_empty();
        for small in [small_first, !small_first] {
            // All uses are spent after three rounds; the fourth finds any evictable expert.
            for _ in 0..=4 * if small { self.small.len() } else { self.main.len() } {
                let queue = if small { &mut self.small } else { &mut self.main };
                match queue.pop_front() {
                    Some((key, 0)) if evictable(key) => {
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
        first_evictable(&mut self.prefetched, evictable)
    }
}

#[derive(Default)]
struct NaiveLfu {
    old: [usize; EXPERTS],
    recent: [usize; EXPERTS],
    uses: usize,
    /// By level, in order of last use.
    used: BTreeMap<usize, VecDeque<usize>>,
    prefetched: VecDeque<usize>,
}

impl NaiveLfu {
    fn sort(&mut self, key: usize) {
        let level = (self.old[key] + self.recent[key]).min(63);
        self.used.entry(level).or_default().push_back(key);
    }
}

impl NaivePolicy for NaiveLfu {
    fn insert(&mut self, key: usize, prefetched: bool) {
        match prefetched {
            true => self.prefetched.push_back(key),
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
            .chain([&mut self.prefetched])
            .for_each(|queue| queue.retain(|k| *k != key));
    }

    fn expire_prefetched(&mut self) {
        std::mem::take(&mut self.prefetched).into_iter().for_each(|key| self.sort(key));
    }

    fn victim(&mut self, evictable: &dyn Fn(usize) -> bool) -> Option<usize> {
        self.used
            .values_mut()
            .chain([&mut self.prefetched])
            .find_map(|queue| first_evictable(queue, evictable))
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
    fn lfu_is_decaying_counts(slots in 1usize..20, events in events()) {
        compare(PolicyKind::Lfu, slots, &events, &mut NaiveLfu::default())?;
    }
}
