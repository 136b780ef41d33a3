use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

#[test]
fn names_are_read_as_they_are_written() {
    for kind in PolicyKind::ALL {
        assert_eq!(kind.name().parse::<PolicyKind>().unwrap(), kind);
    }
    let error = "mru".parse::<PolicyKind>().unwrap_err().to_string();
    assert!(error.contains("\"mru\"") && error.contains("lru, s3-fifo"), "{error}");
}

const EXPERTS: usize = 24;

/// What happens to a cache.
#[derive(Clone, Copy, Debug)]
enum Event {
    Use(usize),
    Ahead(usize),
    /// Its read failed.
    Lose(usize),
}

fn events() -> impl Strategy<Value = Vec<(Event, u32)>> {
    let event = (0..10u8, 0..EXPERTS).prop_map(|(kind, key)| match kind {
        // Some are used more often than others.
        0..4 => Event::Use(key),
        4..8 => Event::Use(key % 5),
        8 => Event::Ahead(key),
        _ => Event::Lose(key),
    });
    let pinned = prop_oneof![3 => Just(0u32), 1 => any::<u32>(), 1 => Just(u32::MAX)];
    prop::collection::vec((event, pinned), 1..300)
}

/// The same by experts instead of slots, as naively as it can be said. Of a pinned expert nobody asks `free`.
trait Model {
    fn insert(&mut self, key: usize, ahead: bool);
    fn hit(&mut self, key: usize);
    fn remove(&mut self, key: usize);
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
        let (Event::Use(key) | Event::Ahead(key) | Event::Lose(key)) = *event;
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
            (Event::Ahead(_), Some(_)) | (Event::Lose(_), None) => {}
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

struct NaiveLru {
    slots: usize,
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

    fn victim(&mut self, free: &dyn Fn(usize) -> bool) -> Option<usize> {
        match self.ahead.len() > self.slots / 8 {
            true => first_free(&mut self.ahead, free).or_else(|| first_free(&mut self.used, free)),
            false => first_free(&mut self.used, free).or_else(|| first_free(&mut self.ahead, free)),
        }
    }
}

/// Experts with their uses; `None` are those that came ahead.
type Uses = VecDeque<(usize, Option<u8>)>;

struct NaiveS3Fifo {
    slots: usize,
    small: Uses,
    main: Uses,
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
        let ghosts = self.slots - self.most_small();
        let ghost = self.ghosts.iter().take(ghosts).any(|g| *g == key);
        if ahead {
            self.small.push_back((key, None));
            return;
        }
        // Its place among the ghosts stays empty.
        self.ghosts.iter_mut().filter(|g| **g == key).for_each(|g| *g = usize::MAX);
        if ghost { &mut self.main } else { &mut self.small }.push_back((key, Some(0)));
    }

    fn hit(&mut self, key: usize) {
        let entry = self.small.iter_mut().chain(&mut self.main).find(|e| e.0 == key).unwrap();
        match &mut entry.1 {
            Some(uses) => *uses = (*uses + 1).min(3),
            None => {
                self.small.retain(|e| e.0 != key);
                self.insert(key, false);
            }
        }
    }

    fn remove(&mut self, key: usize) {
        if self.small.contains(&(key, None)) {
            self.small.retain(|e| e.0 != key);
        } else if self.small.iter().any(|e| e.0 == key) {
            self.small.retain(|e| e.0 != key);
            self.ghosts.iter_mut().filter(|g| **g == key).for_each(|g| *g = usize::MAX);
            self.ghosts.push_front(key);
        }
        self.main.retain(|e| e.0 != key);
    }

    fn victim(&mut self, free: &dyn Fn(usize) -> bool) -> Option<usize> {
        let small_first = self.small.len() >= self.most_small() || self.main.is_empty();
        for small in [small_first, !small_first] {
            // Every use is spent after three rounds; one more finds whatever is free.
            for _ in 0..=4 * if small { self.small.len() } else { self.main.len() } {
                let queue = if small { &mut self.small } else { &mut self.main };
                match queue.pop_front() {
                    Some(entry @ (key, None | Some(0))) if free(key) => {
                        queue.push_front(entry);
                        return Some(key);
                    }
                    Some(entry @ (_, None | Some(0))) => queue.push_back(entry),
                    Some((key, Some(_))) if small => self.main.push_back((key, Some(0))),
                    Some((key, Some(uses))) => self.main.push_back((key, Some(uses - 1))),
                    None => break,
                }
            }
        }
        None
    }
}

proptest! {
    #[test]
    fn lru_is_a_list_by_last_use(slots in 1usize..20, events in events()) {
        let mut model = NaiveLru { slots, used: VecDeque::new(), ahead: VecDeque::new() };
        compare(PolicyKind::Lru, slots, &events, &mut model)?;
    }

    #[test]
    fn s3_fifo_is_two_queues_and_ghosts(slots in 1usize..20, events in events()) {
        let mut model =
            NaiveS3Fifo { slots, small: VecDeque::new(), main: VecDeque::new(), ghosts: VecDeque::new() };
        compare(PolicyKind::S3Fifo, slots, &events, &mut model)?;
    }
}
