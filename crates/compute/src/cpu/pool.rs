//! A resident pool of workers that share out tiles of outputs.
//!
//! What a tile of a [`Grid`] computes does not depend on the tile, or the shapes of the op alone say how it is cut; workers only
//! decide who computes which, so results do not depend on their number. A call allocates nothing.

use std::{
    any::Any,
    cell::UnsafeCell,
    marker::PhantomData,
    mem,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    thread::{self, JoinHandle, Thread},
    time::{Duration, Instant},
};

use crate::{Buffer, Error, View};

/// How long an idle worker looks at the gate before it sleeps: longer than the gap between two ops of a step, and
/// little of a wait for the disk.
const SPIN_TIME: Duration = Duration::from_micros(50);
/// Looks at the gate between two looks at the clock.
const SPINS: u32 = 64;
/// Looks at the gate that a waiting caller takes between offers of its core to others.
const SPINS_BEFORE_YIELD: u32 = 1_000;
/// Stack of a worker; kernels keep little on it.
pub(crate) const STACK_BYTES: usize = 256 << 10;
/// More threads than any machine gains from.
const MAX_THREADS: usize = 1024;

/// The state word of the pool: a job's number, whether it takes workers, and how many work on it.
const ACTIVE: u64 = 0xffff;
const OPEN: u64 = 1 << 16;
const JOB: u64 = 1 << 17;

/// How a view is cut into tiles: blocks of rows, of heads and of columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid<'a> {
    view: View,
    rows: Blocks<'a>,
    heads: usize,
    cols: usize,
    /// Most rows of a tile that may come together with those beside it.
    joined: usize,
}

/// How rows are cut.
#[derive(Clone, Copy, Debug)]
enum Blocks<'a> {
    /// So many each.
    Even(usize),
    /// Where each ends, in an order in which the rows of the view come, or in their own.
    Ends(&'a [usize], Option<Order<'a>>),
}

/// Some rows of a view in an order of their own, each once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Order<'a>(&'a [usize]);

impl<'a> Order<'a> {
    /// `None` if a row comes twice. There is a mark for every row that comes; none is set, before and after.
    pub(crate) fn new(rows: &'a [usize], marks: &mut [bool]) -> Option<Self> {
        let once = rows.iter().all(|row| !std::mem::replace(&mut marks[*row], true));
        rows.iter().for_each(|row| marks[*row] = false);
        once.then_some(Self(rows))
    }
}

impl<'a> Grid<'a> {
    /// Tiles of `rows` rows, `heads` heads and `cols` columns; the last ones may be smaller.
    pub(crate) fn new(view: &View, rows: usize, heads: usize, cols: usize) -> Self {
        Self {
            view: *view,
            rows: Blocks::Even(rows.max(1)),
            heads: heads.max(1),
            cols: cols.max(1),
            joined: 0,
        }
    }

    /// Tiles of runs of rows, one behind the other, of which each ends where the next one begins, and of `cols` columns. With an
    /// order the tiles' rows are numbered by it.
    ///
    /// # Panics
    /// Runs overlap, or rows are not there.
    pub(crate) fn runs(
        view: &View,
        ends: &'a [usize],
        order: Option<Order<'a>>,
        cols: usize,
    ) -> Self {
        let rows = order.map_or(view.rows, |order| order.0.len());
        assert!(
            ends.is_sorted() && ends.last().is_none_or(|end| *end <= rows),
            "runs that overlap"
        );
        assert!(
            order.is_none_or(|order| order.0.iter().all(|row| *row < view.rows)),
            "rows outside a view"
        );
        Self {
            view: *view,
            rows: Blocks::Ends(ends, order),
            heads: view.heads,
            cols: cols.max(1),
            joined: 0,
        }
    }

    /// Tiles of `block` whole rows of a dense matrix.
    pub(crate) fn dense(rows: usize, width: usize, block: usize) -> Self {
        Self::new(&View::rows(Buffer(0), rows, width), block, 1, width)
    }

    /// Where tiles have `rows` rows at most, a worker gets those beside each other that it takes at once as one.
    pub(crate) fn joined(self, rows: usize) -> Self {
        Self { joined: rows, ..self }
    }

    fn blocks(&self) -> [usize; 3] {
        [
            match self.rows {
                Blocks::Even(rows) => self.view.rows.div_ceil(rows),
                Blocks::Ends(ends, _) => ends.len(),
            },
            self.view.heads.div_ceil(self.heads),
            self.view.width.div_ceil(self.cols),
        ]
    }

    /// Tiles of the grid; columns run fastest, then heads.
    fn count(&self) -> usize {
        self.blocks().iter().product()
    }

    /// The rows of a block.
    fn rows(&self, i: usize) -> Range<usize> {
        match self.rows {
            Blocks::Even(rows) => Self::part(self.view.rows, rows, i),
            Blocks::Ends(ends, _) => i.checked_sub(1).map_or(0, |before| ends[before])..ends[i],
        }
    }

    /// Where the tiles end that come as one with tile `i`, of those before `end`.
    fn end(&self, i: usize, end: usize) -> usize {
        let [_, heads, cols] = self.blocks();
        let few = self.rows(i / (heads * cols)).len() <= self.joined;
        if few { end.min((i / cols + 1) * cols) } else { i + 1 }
    }

    fn part(len: usize, block: usize, i: usize) -> Range<usize> {
        i * block..((i + 1) * block).min(len)
    }
}

/// A part of an output that one call of a job may write.
pub(crate) struct Tile<'a, T> {
    data: *mut T,
    view: View,
    rows: Range<usize>,
    order: Option<Order<'a>>,
    heads: Range<usize>,
    cols: Range<usize>,
    of: PhantomData<&'a mut [T]>,
}

impl<'a, T> Tile<'a, T> {
    /// # Safety
    /// `data` is a slice that the grid's view lies in, without overlap of its vectors, borrowed mutably for `'a`;
    /// every number is used for one tile only.
    unsafe fn new(data: *mut T, grid: &Grid<'a>, of: Range<usize>) -> Self {
        let [_, heads, cols] = grid.blocks();
        let (row, head, col) =
            (of.start / (heads * cols), of.start / cols % heads, of.start % cols);
        let part = |col| Grid::part(grid.view.width, grid.cols, col);
        Self {
            data,
            view: grid.view,
            rows: grid.rows(row),
            order: match grid.rows {
                Blocks::Even(_) => None,
                Blocks::Ends(_, order) => order,
            },
            heads: Grid::part(grid.view.heads, grid.heads, head),
            cols: part(col).start..part(col + of.len() - 1).end,
            of: PhantomData,
        }
    }

    /// Rows of the view that the tile has a part of, by their numbers in the grid's order.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Heads of the view that the tile has a part of.
    pub(crate) fn heads(&self) -> Range<usize> {
        self.heads.clone()
    }

    /// Every row and head of the tile.
    pub(crate) fn places(&self) -> impl Iterator<Item = (usize, usize)> + use<T> {
        let heads = self.heads();
        self.rows().flat_map(move |row| heads.clone().map(move |head| (row, head)))
    }

    /// Columns of the view that the tile holds.
    pub(crate) fn cols(&self) -> Range<usize> {
        self.cols.clone()
    }

    /// The tile's columns of one vector, by its row and head in the view.
    pub(crate) fn vector(&mut self, row: usize, head: usize) -> &mut [T] {
        assert!(self.rows.contains(&row) && self.heads.contains(&head), "a vector of another tile");
        let row = self.order.map_or(row, |order| order.0[row]);
        let at = self.view.at(row, head) + self.cols.start;
        // SAFETY: row, head and columns lie in the view, which lies in the slice; tiles of a grid share no
        // number because the view's vectors do not overlap; the borrow of self keeps this one the only one.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(at), self.cols.len()) }
    }

    /// The tile's vectors of one row, which have to be whole and to lie one behind the other.
    pub(crate) fn vectors(&mut self, row: usize) -> &mut [T] {
        let whole = self.cols.len() == self.view.width && self.view.head_stride == self.view.width;
        assert!(whole && self.rows.contains(&row), "vectors of another tile, or parts of vectors");
        let row = self.order.map_or(row, |order| order.0[row]);
        let at = self.view.at(row, self.heads.start);
        // SAFETY: as in `vector`; whole vectors without gaps are one piece.
        unsafe {
            std::slice::from_raw_parts_mut(self.data.add(at), self.heads.len() * self.view.width)
        }
    }

    /// The tile's columns of several vectors, by their rows and heads in the view; `N` at most, the others are empty.
    pub(crate) fn several<const N: usize>(&mut self, places: &[(usize, usize)]) -> [&mut [T]; N] {
        let once = |(i, place): (usize, &(usize, usize))| !places[..i].contains(place);
        assert!(
            places.len() <= N && places.iter().enumerate().all(once),
            "too many vectors, or one twice"
        );
        std::array::from_fn(|i| match places.get(i) {
            Some((row, head)) => {
                let vector = self.vector(*row, *head);
                // SAFETY: the places differ and vectors of a view do not overlap, so no two of these slices share a
                // number; `self` stays borrowed as long as they live.
                unsafe { std::slice::from_raw_parts_mut(vector.as_mut_ptr(), vector.len()) }
            }
            None => &mut [],
        })
    }

    /// The tile's columns of one row, of a tile of one head.
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        self.vector(row, self.heads.start)
    }
}

/// A pointer that workers may share: each uses it for its own tiles.
struct Shared<T>(*mut T);
// SAFETY: the pool hands every tile to one worker only, and tiles do not overlap.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    fn get(&self) -> *mut T {
        self.0
    }
}

/// What a job calls: `(worker, tiles)`.
type Call<'a> = &'a (dyn Fn(usize, Range<usize>) + Sync + 'a);

/// What caller and workers see together.
struct Board {
    gate: AtomicU64,
    next: AtomicUsize,
    /// One part in so many of the tiles that are left is what a worker takes at once.
    shares: usize,
    sleepers: AtomicUsize,
    started: AtomicUsize,
    stop: AtomicBool,
    /// The call and the number of tiles; written while nobody is active, read by active workers.
    job: UnsafeCell<Option<(Call<'static>, usize)>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written by the caller only while the gate is closed and no worker is active, and read by
// workers only while they count as active; the gate orders both.
unsafe impl Sync for Board {}
impl Board {
    /// Takes tiles until there are none left: many at once first, as neighbours read one piece of memory from end to
    /// end, and one at a time in the end, so that all workers are done at about the same time.
    fn work(&self, worker: usize, call: Call<'_>, count: usize) {
        let mut first = self.next.load(SeqCst);
        while first < count {
            let some = ((count - first) / self.shares).max(1);
            match self.next.compare_exchange_weak(first, first + some, SeqCst, SeqCst) {
                Ok(_) => {
                    call(worker, first..first + some);
                    first = self.next.load(SeqCst);
                }
                Err(now) => first = now,
            }
        }
    }

    /// One worker's life.
    fn serve(&self, worker: usize) {
        self.started.fetch_add(1, SeqCst);
        let (mut seen, mut spins, mut idle) = (0, 0u32, Instant::now());
        while !self.stop.load(SeqCst) {
            let gate = self.gate.load(SeqCst);
            if gate & OPEN != 0 && gate / JOB != seen {
                if self.gate.compare_exchange(gate, gate + 1, SeqCst, SeqCst).is_ok() {
                    seen = gate / JOB;
                    self.join(worker);
                    self.gate.fetch_sub(1, SeqCst);
                    (spins, idle) = (0, Instant::now());
                }
                continue;
            }
            spins += 1;
            if !spins.is_multiple_of(SPINS) || idle.elapsed() < SPIN_TIME {
                std::hint::spin_loop();
                continue;
            }
            self.sleepers.fetch_add(1, SeqCst);
            // Whoever opens the gate looks at the sleepers afterwards: one of the two sees the other.
            if self.gate.load(SeqCst) == gate && !self.stop.load(SeqCst) {
                thread::park();
            }
            self.sleepers.fetch_sub(1, SeqCst);
            (spins, idle) = (0, Instant::now());
        }
    }

    fn join(&self, worker: usize) {
        // SAFETY: this worker counts as active, so the caller neither writes the job nor lets it end.
        let job = unsafe { *self.job.get() };
        let Some((call, count)) = job else { return };
        if let Err(cause) = catch_unwind(AssertUnwindSafe(|| self.work(worker, call, count))) {
            self.next.store(count, SeqCst);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(cause);
        }
    }
}

/// Closes a job when its caller leaves it, by return or by panic: nobody may touch the call afterwards.
struct Closing<'a>(&'a Board);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.next.store(usize::MAX / 2, SeqCst);
        self.0.gate.fetch_and(!OPEN, SeqCst);
        let mut spins = 0;
        while self.0.gate.load(SeqCst) & ACTIVE != 0 {
            spins += 1;
            if spins % SPINS_BEFORE_YIELD == 0 {
                thread::yield_now();
            }
            std::hint::spin_loop();
        }
        // SAFETY: the gate is closed and nobody is active, so nobody reads the job.
        unsafe { *self.0.job.get() = None };
    }
}

/// Workers, each with a lane of scratch of its own. The calling thread is worker 0.
pub(crate) struct Pool<L> {
    board: Arc<Board>,
    lanes: Box<[UnsafeCell<L>]>,
    threads: Vec<(Thread, Option<JoinHandle<()>>)>,
}

impl<L: Default + Send> Pool<L> {
    /// A pool in which `threads` threads compute, the caller included.
    ///
    /// # Errors
    /// No thread, too many, or the system starts none.
    pub(crate) fn new(threads: usize) -> Result<Self, Error> {
        if threads == 0 || threads > MAX_THREADS {
            return Err(Error::Device(format!("{threads} threads: choose 1 to {MAX_THREADS}")));
        }
        let board = Arc::new(Board {
            gate: AtomicU64::new(JOB),
            next: AtomicUsize::new(0),
            shares: 2 * threads,
            sleepers: AtomicUsize::new(0),
            started: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
        });
        let lanes = (0..threads).map(|_| UnsafeCell::new(L::default())).collect();
        let mut pool = Self { board, lanes, threads: Vec::with_capacity(threads - 1) };
        for worker in 1..threads {
            let board = Arc::clone(&pool.board);
            let handle = thread::Builder::new()
                .name(format!("compute-{worker}"))
                .stack_size(STACK_BYTES)
                .spawn(move || board.serve(worker))
                .map_err(|e| {
                    Error::Device(format!("the system starts no thread {worker} of {threads}: {e}"))
                })?;
            pool.threads.push((handle.thread().clone(), Some(handle)));
        }
        // What a thread allocates when it starts is over once the pool is there.
        while pool.board.started.load(SeqCst) < threads - 1 {
            thread::yield_now();
        }
        Ok(pool)
    }
}

impl<L: Send> Pool<L> {
    /// Threads that compute, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.lanes.len()
    }

    /// The lanes, to size them.
    pub(crate) fn lanes(&mut self) -> impl Iterator<Item = &mut L> {
        self.lanes.iter_mut().map(UnsafeCell::get_mut)
    }

    /// Calls `f` for every tile of `grid` over `numbers`, each once, in any order on any worker.
    ///
    /// # Panics
    /// When the grid does not lie in the numbers or overlaps itself (the ops' checks exclude it), or `f` panics.
    pub(crate) fn tiles<T: Send>(
        &mut self,
        numbers: &mut [T],
        grid: Grid<'_>,
        f: impl Fn(Tile<'_, T>, &mut L) + Sync,
    ) {
        assert!(
            grid.view.lies_in(numbers.len()) && grid.view.is_disjoint(),
            "a grid outside its numbers"
        );
        let data = Shared(numbers.as_mut_ptr());
        self.each(grid.count(), &|mut all, lane| {
            while !all.is_empty() {
                let end = grid.end(all.start, all.end);
                // SAFETY: asserted above; the numbers stay borrowed until `each` returns, which gives every tile once.
                f(unsafe { Tile::new(data.get(), &grid, all.start..end) }, lane);
                all.start = end;
            }
        });
    }

    /// As [`Pool::tiles`], for two outputs: tile `i` of the one comes with tile `i` of the other.
    ///
    /// # Panics
    /// As [`Pool::tiles`], and when the grids have different numbers of tiles.
    pub(crate) fn tiles2<T: Send, U: Send>(
        &mut self,
        (first, grid): (&mut [T], Grid<'_>),
        (second, other): (&mut [U], Grid<'_>),
        f: impl Fn(Tile<'_, T>, Tile<'_, U>, &mut L) + Sync,
    ) {
        assert!(
            grid.view.lies_in(first.len()) && grid.view.is_disjoint(),
            "a grid outside its numbers"
        );
        assert!(
            other.view.lies_in(second.len()) && other.view.is_disjoint(),
            "a grid outside its numbers"
        );
        assert_eq!(grid.count(), other.count(), "grids of different numbers of tiles");
        let (data, more) = (Shared(first.as_mut_ptr()), Shared(second.as_mut_ptr()));
        self.each(grid.count(), &|all, lane| {
            for i in all {
                let one = i..i + 1;
                // SAFETY: as in `tiles`, for both.
                let tiles = unsafe {
                    (Tile::new(data.get(), &grid, one.clone()), Tile::new(more.get(), &other, one))
                };
                f(tiles.0, tiles.1, lane);
            }
        });
    }

    /// Calls `f(some, lane)` until every number below `count` has been among some.
    fn each(&mut self, count: usize, f: &(dyn Fn(Range<usize>, &mut L) + Sync)) {
        let lanes = Shared(self.lanes.as_mut_ptr());
        let call = |worker: usize, some: Range<usize>| {
            // SAFETY: worker numbers are below the number of lanes and used by one thread each; `&mut self`
            // keeps other jobs away.
            let lane = unsafe { &mut *UnsafeCell::raw_get(lanes.get().add(worker)) };
            f(some, lane);
        };
        if count < 2 || self.threads.is_empty() {
            return call(0, 0..count);
        }
        let call: Call<'_> = &call;
        // SAFETY: only the lifetime changes. `Closing` ends the job before `call` goes, also on panic.
        let call = unsafe { mem::transmute::<Call<'_>, Call<'static>>(call) };
        let board = &*self.board;
        // SAFETY: between jobs the gate is closed and nobody is active, so nobody reads the job.
        unsafe { *board.job.get() = Some((call, count)) };
        board.next.store(0, SeqCst);
        {
            let _closing = Closing(board);
            let gate = board.gate.load(SeqCst);
            board.gate.store(((gate / JOB).wrapping_add(1) * JOB) | OPEN, SeqCst);
            if board.sleepers.load(SeqCst) > 0 {
                self.threads.iter().for_each(|(thread, _)| thread.unpark());
            }
            board.work(0, call, count);
        }
        let panic = board.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(cause) = panic {
            resume_unwind(cause);
        }
    }
}

impl<L> Drop for Pool<L> {
    fn drop(&mut self) {
        self.board.stop.store(true, SeqCst);
        for (thread, handle) in &mut self.threads {
            thread.unpark();
            if let Some(handle) = handle.take() {
                // A worker catches what its calls throw, so it ends well.
                let _ = handle.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(
        rows: usize,
        heads: usize,
        width: usize,
        row_stride: usize,
        head_stride: usize,
    ) -> View {
        View { buffer: Buffer(0), offset: 1, rows, heads, width, row_stride, head_stride }
    }

    #[test]
    fn every_number_is_in_one_tile() {
        let view = view(5, 3, 7, 40, 10);
        for threads in 1..4 {
            let mut pool = Pool::<usize>::new(threads).unwrap();
            for (rows, heads, cols) in [(1, 1, 1), (2, 2, 3), (5, 3, 7), (9, 9, 9)] {
                let mut numbers = vec![0u32; 1 + 4 * 40 + 2 * 10 + 7];
                pool.tiles(&mut numbers, Grid::new(&view, rows, heads, cols), |mut tile, calls| {
                    *calls += 1;
                    for (row, head) in tile.places() {
                        tile.vector(row, head).iter_mut().for_each(|n| *n += 1);
                    }
                });
                for (i, n) in numbers.iter().enumerate() {
                    let (row, at) = (i.div_ceil(40), (i + 39) % 40);
                    assert_eq!(*n, u32::from(row > 0 && at < 30 && at % 10 < 7), "{i}");
                }
            }
        }
    }

    #[test]
    fn tiles_of_few_rows_come_together() {
        let view = view(5, 2, 9, 40, 10);
        // Blocks of two, two and one row, two heads, three blocks of columns.
        for (threads, joined, tiles) in
            [(1, 2, Some(6)), (1, 1, Some(14)), (1, 0, Some(18)), (2, 2, None), (3, 1, None)]
        {
            let mut pool = Pool::<Vec<Range<usize>>>::new(threads).unwrap();
            let mut numbers = vec![0u32; 1 + 5 * 40];
            pool.tiles(&mut numbers, Grid::new(&view, 2, 1, 4).joined(joined), |mut tile, seen| {
                seen.push(tile.cols());
                for (row, head) in tile.places() {
                    tile.vector(row, head).iter_mut().for_each(|n| *n += 1);
                }
            });
            let mut expected = vec![0; numbers.len()];
            for (row, head) in (0..5).flat_map(|row| [(row, 0), (row, 1)]) {
                expected[view.at(row, head)..][..9].fill(1);
            }
            assert_eq!(numbers, expected);
            let seen: Vec<_> = pool.lanes().flat_map(|seen| seen.drain(..)).collect();
            assert_eq!(seen.iter().map(Range::len).sum::<usize>(), 9 * 6);
            assert!(tiles.is_none_or(|tiles| seen.len() == tiles), "{seen:?}");
        }
    }

    #[test]
    fn runs_take_rows_in_an_order_of_their_own() {
        let (view, rows) = (View::rows(Buffer(0), 6, 5), [4, 0, 5, 2]);
        let mut marks = vec![false; 6];
        assert!(Order::new(&[4, 0, 4], &mut marks).is_none() && !marks.contains(&true));
        let mut pool = Pool::<()>::new(2).unwrap();
        for (ends, order) in [(&[1, 1, 4][..], Order::new(&rows, &mut marks)), (&[2, 5], None)] {
            let mut numbers = vec![0; 30];
            pool.tiles(&mut numbers, Grid::runs(&view, ends, order, 2), |mut tile, ()| {
                for row in tile.rows() {
                    tile.row(row).iter_mut().for_each(|n| *n += 1 + row);
                }
            });
            let mut expected = [0; 6];
            for row in 0..ends[ends.len() - 1] {
                expected[order.map_or(row, |_| rows[row])] = 1 + row;
            }
            for (numbers, expected) in numbers.chunks_exact(5).zip(expected) {
                assert_eq!(numbers, [expected; 5]);
            }
        }
    }

    #[test]
    #[should_panic(expected = "runs that overlap")]
    fn runs_end_within_the_view() {
        Grid::runs(&View::rows(Buffer(0), 6, 5), &[3, 7], None, 2);
    }

    #[test]
    fn jobs_of_many_sizes_do_not_get_lost() {
        let mut pool = Pool::<()>::new(3).unwrap();
        for n in (0..300).chain([5000]) {
            let mut numbers = vec![0usize; n + 1];
            pool.tiles(
                &mut numbers,
                Grid::new(&View::rows(Buffer(0), 1, n.max(1)), 1, 1, 1),
                |mut tile, ()| {
                    tile.row(0)[0] = tile.cols().start + 1;
                },
            );
            assert_eq!(numbers.iter().sum::<usize>(), n.max(1) * (n.max(1) + 1) / 2);
            if n % 100 == 99 {
                // Long enough for the workers to fall asleep.
                thread::sleep(std::time::Duration::from_millis(2));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let mut pool = Pool::<()>::new(3).unwrap();
        let grid = Grid::new(&View::rows(Buffer(0), 1, 64), 1, 1, 1);
        for bad in [0, 5, 63] {
            let mut numbers = vec![0; 64];
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.tiles(&mut numbers, grid, |tile, ()| assert_ne!(tile.cols().start, bad));
            }));
            assert!(result.is_err());
            pool.tiles(&mut numbers, grid, |mut tile, ()| tile.row(0)[0] = 7);
            assert_eq!(numbers, vec![7; 64]);
        }
    }

    #[test]
    fn an_impossible_number_of_threads_is_an_error() {
        assert!(Pool::<()>::new(0).is_err());
        assert!(Pool::<()>::new(1 << 20).is_err());
    }
}
