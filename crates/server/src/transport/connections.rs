//! Open connections: their places, and which one ends for another.
//!
//! An address has most of the places, and a few more are in reserve for short requests such as
//! `/health`. A connection without a running answer keeps its place only as long as no other needs
//! it: idle ones, half heads and half bodies can neither keep clients out nor hold up the end of
//! the server.

use std::{
    cmp::Reverse,
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::Notify;

/// Time after which an answer whose client does not read may end for another connection.
const UNREAD: Duration = Duration::from_secs(5);

/// Time in which the next bytes of a client are likely to arrive.
const YOUNG: Duration = Duration::from_secs(1);

/// Bytes of a head that are kept, to tell the API of a request that cannot be read.
const START_BYTES: usize = 256;

/// Bits of an IPv6 address that tell clients apart.
const IPV6_BITS: u32 = 64;

/// Most connections.
#[derive(Clone, Copy, Debug)]
struct PlaceLimits {
    /// Connections of all addresses.
    all: usize,
    /// Those of one address.
    of_address: usize,
}

/// Ordinary places for each place in reserve.
const RESERVE: usize = 16;

/// Kind of a connection's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Ordinary,
    Reserve,
}

/// Activity of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionPhase {
    /// It waits for a request.
    Idle,
    /// A part of a head has arrived.
    Head,
    /// A head, and a part of its body.
    Body,
    /// A whole request.
    Answer,
}

/// Reason for which a connection may end for another one; the first ends first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    NoRequest,
    NoBody,
    /// Its request may be on its way.
    Young,
    Unread,
}

/// The open connections of a server.
#[derive(Debug)]
pub(crate) struct Connections {
    ordinary: PlaceLimits,
    reserve: PlaceLimits,
    places: Mutex<Places>,
}

#[derive(Debug, Default)]
struct Places {
    open: HashMap<u64, TakenPlace>,
    next: u64,
}

#[derive(Debug)]
struct TakenPlace {
    place: Place,
    connection: Arc<Connection>,
}

/// A connection as its task and the others see it.
#[derive(Debug)]
pub(crate) struct Connection {
    id: u64,
    address: IpAddr,
    state: Mutex<ConnectionState>,
    ended: Notify,
    connections: Arc<Connections>,
}

#[derive(Debug)]
struct ConnectionState {
    phase: ConnectionPhase,
    since: Instant,
    /// Since when bytes wait for the client to read.
    unread: Option<Instant>,
    /// First bytes of the head that arrives.
    start: Vec<u8>,
}

/// Place of a connection, which is free again when it is dropped.
#[derive(Debug)]
pub(crate) struct OpenConnection(pub(crate) Arc<Connection>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.connections.lock().open.remove(&self.0.id);
    }
}

impl PlaceLimits {
    /// Most of `all` places for one address: seven eighths.
    fn new(all: usize) -> Self {
        let all = all.max(1);
        Self { all, of_address: (all - all / 8).max(1) }
    }
}

impl Connections {
    /// Places for `all` connections, and a reserve.
    pub(crate) fn new(all: usize) -> Self {
        let (ordinary, reserve) = (PlaceLimits::new(all), PlaceLimits::new(all / RESERVE));
        Self { ordinary, reserve, places: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a place to a connection from `peer`, for which another one may end. `None` if all have
    /// running answers.
    pub(crate) fn admit(self: &Arc<Self>, peer: IpAddr) -> Option<OpenConnection> {
        let address = address_of(peer);
        let mut places = self.lock();
        let place = [Place::Ordinary, Place::Reserve]
            .into_iter()
            .find(|place| places.make_room(*place, self.limits(*place), address))?;
        let id = places.next;
        places.next += 1;
        let state = ConnectionState {
            phase: ConnectionPhase::Idle,
            since: Instant::now(),
            unread: None,
            start: Vec::new(),
        };
        let connection = Arc::new(Connection {
            id,
            address,
            state: Mutex::new(state),
            ended: Notify::new(),
            connections: Arc::clone(self),
        });
        places.open.insert(id, TakenPlace { place, connection: Arc::clone(&connection) });
        Some(OpenConnection(connection))
    }

    fn limits(&self, place: Place) -> PlaceLimits {
        match place {
            Place::Ordinary => self.ordinary,
            Place::Reserve => self.reserve,
        }
    }
}

impl Places {
    /// Whether a place of a kind is free for an address, after the end of another connection if
    /// need be.
    fn make_room(&mut self, place: Place, limits: PlaceLimits, address: IpAddr) -> bool {
        let of_kind = || self.open.values().filter(|taken| taken.place == place);
        let of_address = of_kind().filter(|taken| taken.connection.address == address).count();
        if of_address >= limits.of_address {
            return self.end_one(place, Some(address));
        }
        of_kind().count() < limits.all || self.end_one(place, None)
    }

    /// Ends the connection that is missed least: of the address with most of them, one that waits
    /// for a request before one that waits for a body, the oldest one first. Unread answers are the
    /// last.
    fn end_one(&mut self, place: Place, address: Option<IpAddr>) -> bool {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for taken in self.open.values() {
            *counts.entry(taken.connection.address).or_default() += 1;
        }
        let now = Instant::now();
        let candidates = self.open.values().filter(|taken| {
            taken.place == place && address.is_none_or(|ours| taken.connection.address == ours)
        });
        let least = candidates.filter_map(|TakenPlace { connection, .. }| {
            let state = connection.lock();
            let rank = state.rank(now)?;
            let count = counts.get(&connection.address).copied().unwrap_or(0);
            Some((rank == Rank::Unread, Reverse(count), rank, state.since, connection.id))
        });
        let Some((.., id)) = least.min() else { return false };
        if let Some(taken) = self.open.remove(&id) {
            taken.connection.ended.notify_one();
        }
        true
    }
}

impl ConnectionState {
    fn enter(&mut self, phase: ConnectionPhase) {
        if self.phase != phase {
            (self.phase, self.since) = (phase, Instant::now());
        }
    }

    /// Rank of a connection that may end for another one.
    fn rank(&self, now: Instant) -> Option<Rank> {
        let age = |since| now.saturating_duration_since(since);
        match (self.phase, self.unread) {
            (_, Some(since)) => (age(since) >= UNREAD).then_some(Rank::Unread),
            (ConnectionPhase::Answer, None) => None,
            _ if age(self.since) < YOUNG => Some(Rank::Young),
            (ConnectionPhase::Idle | ConnectionPhase::Head, None) => Some(Rank::NoRequest),
            (ConnectionPhase::Body, None) => Some(Rank::NoBody),
        }
    }
}

impl Connection {
    fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the connection has to end for another one.
    pub(crate) async fn ended(&self) {
        self.ended.notified().await;
    }

    /// Whether a whole request is being answered, or a part of an answer is still to be sent.
    pub(crate) fn is_answering(&self) -> bool {
        let state = self.lock();
        state.phase == ConnectionPhase::Answer || state.unread.is_some()
    }

    /// Takes note of received bytes.
    pub(crate) fn received(&self, bytes: &[u8]) {
        let mut state = self.lock();
        if bytes.is_empty()
            || matches!(state.phase, ConnectionPhase::Body | ConnectionPhase::Answer)
        {
            return;
        }
        state.enter(ConnectionPhase::Head);
        let kept = bytes.len().min(START_BYTES.saturating_sub(state.start.len()));
        state.start.extend_from_slice(&bytes[..kept]);
    }

    /// Takes note of whether bytes wait for the client to read.
    pub(crate) fn waits_for_reader(&self, waits: bool) {
        let mut state = self.lock();
        match waits {
            true => drop(state.unread.get_or_insert_with(Instant::now)),
            false => state.unread = None,
        }
    }

    /// First bytes of a head that was not complete, or not valid.
    pub(crate) fn start_of_head(&self) -> Vec<u8> {
        self.lock().start.clone()
    }

    /// Takes note of a head whose body follows.
    pub(crate) fn begin_body(&self) {
        let mut state = self.lock();
        state.enter(ConnectionPhase::Body);
        state.start.clear();
    }

    /// Takes note of the end of a request.
    pub(crate) fn begin_answer(&self) {
        let mut state = self.lock();
        state.enter(ConnectionPhase::Answer);
        state.start.clear();
    }

    /// Takes note of the end of an answer.
    pub(crate) fn end_answer(&self) {
        self.lock().enter(ConnectionPhase::Idle);
    }

    /// Whether the connection may have a long answer, which needs an ordinary place.
    pub(crate) fn may_answer_long(&self) -> bool {
        let connections = &self.connections;
        let mut places = connections.lock();
        let ours = places.open.get(&self.id).map(|taken| taken.place);
        if ours != Some(Place::Reserve) {
            return true;
        }
        let has_room = places.make_room(Place::Ordinary, connections.ordinary, self.address);
        if has_room && let Some(taken) = places.open.get_mut(&self.id) {
            taken.place = Place::Ordinary;
        }
        has_room
    }
}

/// Address by which clients are told apart: the network of an IPv6 client has many, and so has the
/// local machine.
fn address_of(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        local if local.is_loopback() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(address) => {
            let network = u128::MAX << (u128::BITS - IPV6_BITS);
            Ipv6Addr::from_bits(address.to_bits() & network).into()
        }
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    const B: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));

    fn connections() -> Arc<Connections> {
        let ordinary = PlaceLimits { all: 4, of_address: 3 };
        let reserve = PlaceLimits { all: 2, of_address: 1 };
        Arc::new(Connections { ordinary, reserve, places: Mutex::default() })
    }

    /// Whether the connection still has its place.
    fn is_open(open: &OpenConnection) -> bool {
        open.0.connections.lock().open.contains_key(&open.0.id)
    }

    fn answering(connections: &Arc<Connections>, peer: IpAddr) -> OpenConnection {
        let open = connections.admit(peer).unwrap();
        open.0.begin_answer();
        open
    }

    #[test]
    fn the_oldest_connection_without_an_answer_ends_for_another_one() {
        let connections = connections();
        let [idle, head, body] = [(); 3].map(|()| connections.admit(A).unwrap());
        head.0.received(b"GET /");
        body.0.begin_body();
        // It is idle for the shortest time.
        idle.0.begin_answer();
        idle.0.end_answer();
        for open in [&idle, &head, &body] {
            open.0.lock().since -= YOUNG;
        }
        let young = connections.admit(A).unwrap();
        assert_eq!([&idle, &head, &body, &young].map(is_open), [true, false, true, true]);
        let fourth = answering(&connections, A);
        assert_eq!([&idle, &body, &young].map(is_open), [false, true, true]);
        let fifth = answering(&connections, A);
        assert_eq!([&body, &young].map(is_open), [false, true]);
        let sixth = answering(&connections, A);
        assert!(!is_open(&young));
        assert!([&fourth, &fifth, &sixth].into_iter().all(is_open));
    }

    #[test]
    fn one_address_leaves_places_and_the_reserve_takes_short_requests() {
        let connections = connections();
        let taken = [(); 3].map(|()| answering(&connections, A));
        let reserved = connections.admit(A).unwrap();
        assert!(!reserved.0.may_answer_long());
        reserved.0.begin_answer();
        assert!(connections.admit(A).is_none());
        let other = answering(&connections, B);
        assert!(other.0.may_answer_long());
        // A place that is free again is taken by the next long request.
        drop(taken);
        assert!(reserved.0.may_answer_long());
    }

    #[test]
    fn connections_of_the_address_with_most_of_them_end_first() {
        let connections = connections();
        let other = connections.admit(B).unwrap();
        let [first, second, third] = [(); 3].map(|()| connections.admit(A).unwrap());
        let last = connections.admit(B).unwrap();
        assert_eq!(
            [&other, &first, &second, &third, &last].map(is_open),
            [true, false, true, true, true]
        );
    }

    #[test]
    fn clients_are_told_apart_by_address_or_network() {
        let address = |text: &str| address_of(text.parse().unwrap());
        assert_eq!(address("::1"), address("127.0.0.9"));
        assert_eq!(address("::ffff:10.0.0.1"), A);
        assert_eq!(address("2001:db8::1"), address("2001:db8::2:1"));
        assert_ne!(address("2001:db8::1"), address("2001:db8:0:1::1"));
        assert_ne!(A, B);
    }
}
