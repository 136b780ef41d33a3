//! Thread pool that distributes output tiles over resident workers.
//!
//! Results do not depend on the number of threads: either the value of an output does not depend on
//! its tile, or the tiling depends on the op's shapes only. Workers claim tiles dynamically. A call
//! allocates nothing.

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

use moeflux_ops::{Buffer, Error, View};

/// Default time that an idle worker spins before it parks: longer than the gap between two ops of a
/// step, and short compared with a disk read. A worker that spins longer yields to other threads.
pub(crate) const SPIN_TIME: Duration = Duration::from_micros(50);
/// Spin iterations between two reads of the clock.
const SPINS_PER_CLOCK: u32 = 64;
/// Spin iterations of a waiting caller between two yields.
const SPINS_BEFORE_YIELD: u32 = 1_000;
/// Stack size of a worker. Kernels use little stack.
pub(crate) const STACK_BYTES: usize = 256 << 10;
/// Maximum number of threads.
const MAX_THREADS: usize = 1024;

// Fields of the gate word.
/// Bits 0-15: number of active workers.
const ACTIVE_MASK: u64 = 0xffff;
/// Bit 16: whether workers may enter the job.
const OPEN_BIT: u64 = 1 << 16;
/// Bits 17 and up: job number.
const JOB_UNIT: u64 = 1 << 17;

/// Tiling of a view: blocks of rows, heads and columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid<'a> {
    view: View,
    rows: RowBlocks<'a>,
    heads: usize,
    cols: usize,
    /// Maximum rows of tiles that are merged with their neighbours in column direction.
    merge_rows: usize,
}

/// Tiling of rows.
#[derive(Clone, Copy, Debug)]
enum RowBlocks<'a> {
    /// Blocks of equal size.
    Even(usize),
    /// End of each block, with an optional permutation of the rows.
    Ends(&'a [usize], Option<RowOrder<'a>>),
}

/// Rows of a view in arbitrary order, each at most once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowOrder<'a>(&'a [usize]);

impl<'a> RowOrder<'a> {
    /// Returns `None` if a row occurs twice. `marks` has an element for every row; all are false
    /// before and after.
    pub(crate) fn new(rows: &'a [usize], marks: &mut [bool]) -> Option<Self> {
        let once = rows.iter().all(|row| !std::mem::replace(&mut marks[*row], true));
        rows.iter().for_each(|row| marks[*row] = false);
        once.then_some(Self(rows))
    }
}

impl<'a> Grid<'a> {
    /// Tiles of `rows` rows, `heads` heads and `cols` columns. The last tiles may be smaller.
    pub(crate) fn new(view: &View, rows: usize, heads: usize, cols: usize) -> Self {
        Self {
            view: *view,
            rows: RowBlocks::Even(rows.max(1)),
            heads: heads.max(1),
            cols: cols.max(1),
            merge_rows: 0,
        }
    }

    /// Tiles of consecutive runs of rows and of `cols` columns. Run `i` ends at row `ends[i]`. With
    /// an order, rows are indices into it.
    ///
    /// # Panics
    /// If runs overlap or a row is outside the view.
    pub(crate) fn runs(
        view: &View,
        ends: &'a [usize],
        order: Option<RowOrder<'a>>,
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
            rows: RowBlocks::Ends(ends, order),
            heads: view.heads,
            cols: cols.max(1),
            merge_rows: 0,
        }
    }

    /// Tiles of `block` full rows of a dense matrix.
    pub(crate) fn dense(rows: usize, width: usize, block: usize) -> Self {
        Self::new(&View::rows(Buffer::INTERNAL, rows, width), block, 1, width)
    }

    /// Merges adjacent tiles in column direction that a worker claims together, if they have at
    /// most `rows` rows.
    pub(crate) fn merge_rows(self, rows: usize) -> Self {
        Self { merge_rows: rows, ..self }
    }

    fn blocks(&self) -> [usize; 3] {
        [
            match self.rows {
                RowBlocks::Even(rows) => self.view.rows.div_ceil(rows),
                RowBlocks::Ends(ends, _) => ends.len(),
            },
            self.view.heads.div_ceil(self.heads),
            self.view.width.div_ceil(self.cols),
        ]
    }

    /// Number of tiles. Columns vary fastest, then heads.
    fn count(&self) -> usize {
        self.blocks().iter().product()
    }

    /// Rows of block `i`.
    fn rows(&self, i: usize) -> Range<usize> {
        match self.rows {
            RowBlocks::Even(rows) => Self::block_range(self.view.rows, rows, i),
            RowBlocks::Ends(ends, _) => i.checked_sub(1).map_or(0, |before| ends[before])..ends[i],
        }
    }

    /// End of the range of tiles that are merged with tile `i`, at most `end`.
    fn merged_end(&self, i: usize, end: usize) -> usize {
        let [_, heads, cols] = self.blocks();
        let merges = self.rows(i / (heads * cols)).len() <= self.merge_rows;
        if merges { end.min((i / cols + 1) * cols) } else { i + 1 }
    }

    fn block_range(len: usize, block: usize, i: usize) -> Range<usize> {
        i * block..((i + 1) * block).min(len)
    }
}

/// Tile of an output, writable by one call of a job.
pub(crate) struct Tile<'a, T> {
    data: *mut T,
    view: View,
    rows: Range<usize>,
    order: Option<RowOrder<'a>>,
    heads: Range<usize>,
    cols: Range<usize>,
    borrow: PhantomData<&'a mut [T]>,
}

impl<'a, T> Tile<'a, T> {
    /// # Safety
    /// `data` points to a slice that is borrowed mutably for `'a`. The grid's view is inside that
    /// slice and its vectors do not overlap. Every tile index is used once.
    unsafe fn new(data: *mut T, grid: &Grid<'a>, tiles: Range<usize>) -> Self {
        let [_, heads, cols] = grid.blocks();
        let (row, head, col) =
            (tiles.start / (heads * cols), tiles.start / cols % heads, tiles.start % cols);
        let block_cols = |col| Grid::block_range(grid.view.width, grid.cols, col);
        Self {
            data,
            view: grid.view,
            rows: grid.rows(row),
            order: match grid.rows {
                RowBlocks::Even(_) => None,
                RowBlocks::Ends(_, order) => order,
            },
            heads: Grid::block_range(grid.view.heads, grid.heads, head),
            cols: block_cols(col).start..block_cols(col + tiles.len() - 1).end,
            borrow: PhantomData,
        }
    }

    /// Rows of the tile, as indices into the grid's order if it has one.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Heads of the tile.
    pub(crate) fn heads(&self) -> Range<usize> {
        self.heads.clone()
    }

    /// Row and head of every vector of the tile.
    pub(crate) fn coords(&self) -> impl Iterator<Item = (usize, usize)> + use<T> {
        let heads = self.heads();
        self.rows().flat_map(move |row| heads.clone().map(move |head| (row, head)))
    }

    /// Columns of the tile.
    pub(crate) fn cols(&self) -> Range<usize> {
        self.cols.clone()
    }

    /// The tile's columns of one vector.
    pub(crate) fn vector(&mut self, row: usize, head: usize) -> &mut [T] {
        assert!(self.rows.contains(&row) && self.heads.contains(&head), "a vector of another tile");
        let row = self.order.map_or(row, |order| order.0[row]);
        let start = self.view.index(row, head) + self.cols.start;
        // SAFETY: row, head and columns are inside the view, which is inside the slice. Tiles of a
        // grid share no element, because vectors of the view do not overlap. The borrow of `self`
        // makes this slice unique.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), self.cols.len()) }
    }

    /// All vectors of one row of the tile, which must be full-width and contiguous.
    pub(crate) fn vectors(&mut self, row: usize) -> &mut [T] {
        let whole = self.cols.len() == self.view.width && self.view.head_stride == self.view.width;
        assert!(whole && self.rows.contains(&row), "vectors of another tile, or parts of vectors");
        let row = self.order.map_or(row, |order| order.0[row]);
        let start = self.view.index(row, self.heads.start);
        // SAFETY: as in `vector`; full-width vectors without gaps are contiguous.
        unsafe {
            std::slice::from_raw_parts_mut(self.data.add(start), self.heads.len() * self.view.width)
        }
    }

    /// The tile's columns of up to `N` different vectors, given by row and head. Unused slices are
    /// empty.
    pub(crate) fn vectors_mut<const N: usize>(
        &mut self,
        coords: &[(usize, usize)],
    ) -> [&mut [T]; N] {
        let once = |(i, coord): (usize, &(usize, usize))| !coords[..i].contains(coord);
        assert!(
            coords.len() <= N && coords.iter().enumerate().all(once),
            "too many vectors, or one twice"
        );
        std::array::from_fn(|i| match coords.get(i) {
            Some((row, head)) => {
                let vector = self.vector(*row, *head);
                // SAFETY: the coordinates differ and vectors of a view do not overlap, so the
                // slices are disjoint. `self` stays borrowed as long as they live.
                unsafe { std::slice::from_raw_parts_mut(vector.as_mut_ptr(), vector.len()) }
            }
            None => &mut [],
        })
    }

    /// The tile's columns of one row, for a tile of one head.
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        self.vector(row, self.heads.start)
    }
}

/// Pointer that workers share; each worker accesses its own tiles or scratch only.
struct SharedPtr<T>(*mut T);
// SAFETY: the pool gives every tile and every scratch element to one worker only, and they do not
// overlap.
unsafe impl<T: Send> Sync for SharedPtr<T> {}

impl<T> SharedPtr<T> {
    fn get(&self) -> *mut T {
        self.0
    }
}

/// Function of a job; the arguments are the worker and a range of tiles.
type JobFn<'a> = &'a (dyn Fn(usize, Range<usize>) + Sync + 'a);

/// State that the caller and the workers share.
struct PoolState {
    /// Job number, open bit and number of active workers.
    gate: AtomicU64,
    /// First tile that is not claimed.
    next: AtomicUsize,
    /// A worker claims `1 / claim_divisor` of the remaining tiles at a time.
    claim_divisor: usize,
    /// Time that an idle worker spins before it parks.
    spin: Duration,
    sleepers: AtomicUsize,
    started: AtomicUsize,
    stop: AtomicBool,
    /// Function and number of tiles. Written while no worker is active, read by active workers.
    job: UnsafeCell<Option<(JobFn<'static>, usize)>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: the caller writes `job` only while the gate is closed and no worker is active. Workers
// read it only while they are counted as active. Accesses to the gate order both.
unsafe impl Sync for PoolState {}

impl PoolState {
    /// Claims and runs tiles until none are left. Claims are large at first, because adjacent tiles
    /// read contiguous memory, and shrink to one tile, so that all workers finish at about the same
    /// time.
    fn take_tiles(&self, worker: usize, job: JobFn<'_>, count: usize) {
        let mut first = self.next.load(SeqCst);
        while first < count {
            let claimed = ((count - first) / self.claim_divisor).max(1);
            match self.next.compare_exchange_weak(first, first + claimed, SeqCst, SeqCst) {
                Ok(_) => {
                    job(worker, first..first + claimed);
                    first = self.next.load(SeqCst);
                }
                Err(current) => first = current,
            }
        }
    }

    /// Main loop of a worker thread.
    fn worker_loop(&self, worker: usize) {
        self.started.fetch_add(1, SeqCst);
        let (mut seen, mut spins, mut idle) = (0, 0u32, Instant::now());
        while !self.stop.load(SeqCst) {
            let gate = self.gate.load(SeqCst);
            if gate & OPEN_BIT != 0 && gate / JOB_UNIT != seen {
                if self.gate.compare_exchange(gate, gate + 1, SeqCst, SeqCst).is_ok() {
                    seen = gate / JOB_UNIT;
                    self.run_job(worker);
                    self.gate.fetch_sub(1, SeqCst);
                    (spins, idle) = (0, Instant::now());
                }
                continue;
            }
            spins += 1;
            if !spins.is_multiple_of(SPINS_PER_CLOCK) {
                std::hint::spin_loop();
                continue;
            }
            let idle_time = idle.elapsed();
            if idle_time < self.spin {
                if idle_time >= SPIN_TIME {
                    thread::yield_now();
                }
                continue;
            }
            self.sleepers.fetch_add(1, SeqCst);
            // The caller opens the gate before it reads `sleepers`, and this worker counts itself
            // before it reads the gate. So at least one of the two sees the other.
            if self.gate.load(SeqCst) == gate && !self.stop.load(SeqCst) {
                thread::park();
            }
            self.sleepers.fetch_sub(1, SeqCst);
            (spins, idle) = (0, Instant::now());
        }
    }

    fn run_job(&self, worker: usize) {
        // SAFETY: this worker is counted as active, so the caller neither writes the job nor ends
        // it.
        let job = unsafe { *self.job.get() };
        let Some((job, count)) = job else { return };
        if let Err(cause) = catch_unwind(AssertUnwindSafe(|| self.take_tiles(worker, job, count))) {
            self.next.store(count, SeqCst);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(cause);
        }
    }
}

/// Closes the job when the caller leaves it, by return or panic, and waits until no worker uses it.
struct JobGuard<'a>(&'a PoolState);

impl Drop for JobGuard<'_> {
    fn drop(&mut self) {
        self.0.next.store(usize::MAX / 2, SeqCst);
        self.0.gate.fetch_and(!OPEN_BIT, SeqCst);
        let mut spins = 0;
        while self.0.gate.load(SeqCst) & ACTIVE_MASK != 0 {
            spins += 1;
            if spins % SPINS_BEFORE_YIELD == 0 {
                thread::yield_now();
            }
            std::hint::spin_loop();
        }
        // SAFETY: the gate is closed and no worker is active, so no thread reads the job.
        unsafe { *self.0.job.get() = None };
    }
}

/// Thread pool with scratch memory per worker. The calling thread is worker 0.
pub(crate) struct ThreadPool<L> {
    state: Arc<PoolState>,
    scratch: Box<[UnsafeCell<L>]>,
    threads: Vec<(Thread, Option<JoinHandle<()>>)>,
}

impl<L: Default + Send> ThreadPool<L> {
    /// Starts a pool of `threads` threads, the caller included. Idle ones spin for `spin` before
    /// they park.
    ///
    /// # Errors
    /// `threads` is out of range, or the system cannot start a thread.
    pub(crate) fn new(threads: usize, spin: Duration) -> Result<Self, Error> {
        if threads == 0 || threads > MAX_THREADS {
            return Err(Error::Device(format!("{threads} threads: choose 1 to {MAX_THREADS}")));
        }
        let state = Arc::new(PoolState {
            gate: AtomicU64::new(JOB_UNIT),
            next: AtomicUsize::new(0),
            claim_divisor: 2 * threads,
            spin,
            sleepers: AtomicUsize::new(0),
            started: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
        });
        let scratch = (0..threads).map(|_| UnsafeCell::new(L::default())).collect();
        let mut pool = Self { state, scratch, threads: Vec::with_capacity(threads - 1) };
        for worker in 1..threads {
            let state = Arc::clone(&pool.state);
            let handle = thread::Builder::new()
                .name(format!("compute-{worker}"))
                .stack_size(STACK_BYTES)
                .spawn(move || state.worker_loop(worker))
                .map_err(|e| {
                    Error::Device(format!("the system starts no thread {worker} of {threads}: {e}"))
                })?;
            pool.threads.push((handle.thread().clone(), Some(handle)));
        }
        // Threads allocate while they start. Waiting keeps these allocations out of later calls.
        while pool.state.started.load(SeqCst) < threads - 1 {
            thread::yield_now();
        }
        Ok(pool)
    }
}

impl<L: Send> ThreadPool<L> {
    /// Number of threads, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.scratch.len()
    }

    /// Scratch of all workers, for resizing.
    pub(crate) fn scratch(&mut self) -> impl Iterator<Item = &mut L> {
        self.scratch.iter_mut().map(UnsafeCell::get_mut)
    }

    /// Calls `f` once for every tile of `grid` over `values`, in any order on any worker.
    ///
    /// # Panics
    /// If the grid is not inside `values` or overlaps itself, which the op checks exclude, or if
    /// `f` panics.
    pub(crate) fn tiles<T: Send>(
        &mut self,
        values: &mut [T],
        grid: Grid<'_>,
        f: impl Fn(Tile<'_, T>, &mut L) + Sync,
    ) {
        assert!(
            grid.view.is_within(values.len()) && grid.view.is_disjoint(),
            "a grid outside its values"
        );
        let data = SharedPtr(values.as_mut_ptr());
        self.for_each_range(grid.count(), &|mut range, scratch| {
            while !range.is_empty() {
                let end = grid.merged_end(range.start, range.end);
                // SAFETY: the assertions above hold. `values` stays borrowed until `for_each_range`
                // returns, which passes every tile once.
                f(unsafe { Tile::new(data.get(), &grid, range.start..end) }, scratch);
                range.start = end;
            }
        });
    }

    /// Does the same as [`ThreadPool::tiles`] for two outputs: tile `i` of one comes with tile `i`
    /// of the other.
    ///
    /// # Panics
    /// As [`ThreadPool::tiles`], and if the grids have different numbers of tiles.
    pub(crate) fn tiles2<T: Send, U: Send>(
        &mut self,
        first: &mut [T],
        grid: Grid<'_>,
        second: &mut [U],
        other: Grid<'_>,
        f: impl Fn(Tile<'_, T>, Tile<'_, U>, &mut L) + Sync,
    ) {
        assert!(
            grid.view.is_within(first.len()) && grid.view.is_disjoint(),
            "a grid outside its values"
        );
        assert!(
            other.view.is_within(second.len()) && other.view.is_disjoint(),
            "a grid outside its values"
        );
        assert_eq!(grid.count(), other.count(), "grids of different numbers of tiles");
        let (data, more) = (SharedPtr(first.as_mut_ptr()), SharedPtr(second.as_mut_ptr()));
        self.for_each_range(grid.count(), &|range, scratch| {
            for i in range {
                let tile = i..i + 1;
                // SAFETY: as in `tiles`, for both outputs.
                let tiles = unsafe {
                    (
                        Tile::new(data.get(), &grid, tile.clone()),
                        Tile::new(more.get(), &other, tile),
                    )
                };
                f(tiles.0, tiles.1, scratch);
            }
        });
    }

    /// Calls `f` with disjoint ranges that cover `0..count`, on all workers.
    fn for_each_range(&mut self, count: usize, f: &(dyn Fn(Range<usize>, &mut L) + Sync)) {
        let scratch = SharedPtr(self.scratch.as_mut_ptr());
        let job = |worker: usize, range: Range<usize>| {
            // SAFETY: worker indices are below the length of `scratch` and each belongs to one
            // thread. `&mut self` excludes other jobs.
            let scratch = unsafe { &mut *UnsafeCell::raw_get(scratch.get().add(worker)) };
            f(range, scratch);
        };
        if count < 2 || self.threads.is_empty() {
            return job(0, 0..count);
        }
        let job: JobFn<'_> = &job;
        // SAFETY: only the lifetime changes. `JobGuard` ends the job before `job` is dropped, also
        // on panic.
        let job = unsafe { mem::transmute::<JobFn<'_>, JobFn<'static>>(job) };
        let state = &*self.state;
        // SAFETY: between jobs the gate is closed and no worker is active, so no thread reads the
        // job.
        unsafe { *state.job.get() = Some((job, count)) };
        state.next.store(0, SeqCst);
        {
            let _guard = JobGuard(state);
            let gate = state.gate.load(SeqCst);
            state.gate.store(((gate / JOB_UNIT).wrapping_add(1) * JOB_UNIT) | OPEN_BIT, SeqCst);
            if state.sleepers.load(SeqCst) > 0 {
                self.threads.iter().for_each(|(thread, _)| thread.unpark());
            }
            state.take_tiles(0, job, count);
        }
        let panic = state.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(cause) = panic {
            resume_unwind(cause);
        }
    }
}

impl<L> Drop for ThreadPool<L> {
    fn drop(&mut self) {
        self.state.stop.store(true, SeqCst);
        for (thread, handle) in &mut self.threads {
            thread.unpark();
            if let Some(handle) = handle.take() {
                // Workers catch panics of their jobs, so the join succeeds.
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
        View { buffer: Buffer::INTERNAL, offset: 1, rows, heads, width, row_stride, head_stride }
    }

    #[test]
    fn every_element_is_in_exactly_one_tile() {
        let view = view(5, 3, 7, 40, 10);
        for threads in 1..4 {
            let mut pool = ThreadPool::<usize>::new(threads, SPIN_TIME).unwrap();
            for (rows, heads, cols) in [(1, 1, 1), (2, 2, 3), (5, 3, 7), (9, 9, 9)] {
                let mut values = vec![0u32; 1 + 4 * 40 + 2 * 10 + 7];
                pool.tiles(&mut values, Grid::new(&view, rows, heads, cols), |mut tile, calls| {
                    *calls += 1;
                    for (row, head) in tile.coords() {
                        tile.vector(row, head).iter_mut().for_each(|n| *n += 1);
                    }
                });
                for (i, n) in values.iter().enumerate() {
                    let (row, col) = (i.div_ceil(40), (i + 39) % 40);
                    assert_eq!(*n, u32::from(row > 0 && col < 30 && col % 10 < 7), "{i}");
                }
            }
        }
    }

    #[test]
    fn tiles_of_few_rows_are_merged() {
        let view = view(5, 2, 9, 40, 10);
        // Row blocks of 2, 2 and 1 rows; two heads; three column blocks.
        for (threads, merge_rows, tiles) in
            [(1, 2, Some(6)), (1, 1, Some(14)), (1, 0, Some(18)), (2, 2, None), (3, 1, None)]
        {
            let mut pool = ThreadPool::<Vec<Range<usize>>>::new(threads, SPIN_TIME).unwrap();
            let mut values = vec![0u32; 1 + 5 * 40];
            pool.tiles(
                &mut values,
                Grid::new(&view, 2, 1, 4).merge_rows(merge_rows),
                |mut tile, seen| {
                    seen.push(tile.cols());
                    for (row, head) in tile.coords() {
                        tile.vector(row, head).iter_mut().for_each(|n| *n += 1);
                    }
                },
            );
            let mut expected = vec![0; values.len()];
            for (row, head) in (0..5).flat_map(|row| [(row, 0), (row, 1)]) {
                expected[view.index(row, head)..][..9].fill(1);
            }
            assert_eq!(values, expected);
            let seen: Vec<_> = pool.scratch().flat_map(|seen| seen.drain(..)).collect();
            assert_eq!(seen.iter().map(Range::len).sum::<usize>(), 9 * 6);
            assert!(tiles.is_none_or(|tiles| seen.len() == tiles), "{seen:?}");
        }
    }

    #[test]
    fn runs_permute_rows() {
        let (view, rows) = (View::rows(Buffer::INTERNAL, 6, 5), [4, 0, 5, 2]);
        let mut marks = vec![false; 6];
        assert!(RowOrder::new(&[4, 0, 4], &mut marks).is_none() && !marks.contains(&true));
        let mut pool = ThreadPool::<()>::new(2, SPIN_TIME).unwrap();
        for (ends, order) in [(&[1, 1, 4][..], RowOrder::new(&rows, &mut marks)), (&[2, 5], None)] {
            let mut values = vec![0; 30];
            pool.tiles(&mut values, Grid::runs(&view, ends, order, 2), |mut tile, ()| {
                for row in tile.rows() {
                    tile.row(row).iter_mut().for_each(|n| *n += 1 + row);
                }
            });
            let mut expected = [0; 6];
            for row in 0..ends[ends.len() - 1] {
                expected[order.map_or(row, |_| rows[row])] = 1 + row;
            }
            for (values, expected) in values.chunks_exact(5).zip(expected) {
                assert_eq!(values, [expected; 5]);
            }
        }
    }

    #[test]
    #[should_panic(expected = "runs that overlap")]
    fn runs_end_within_the_view() {
        Grid::runs(&View::rows(Buffer::INTERNAL, 6, 5), &[3, 7], None, 2);
    }

    #[test]
    fn jobs_of_many_sizes_complete() {
        let mut pool = ThreadPool::<()>::new(3, SPIN_TIME).unwrap();
        for n in (0..300).chain([5000]) {
            let mut values = vec![0usize; n + 1];
            pool.tiles(
                &mut values,
                Grid::new(&View::rows(Buffer::INTERNAL, 1, n.max(1)), 1, 1, 1),
                |mut tile, ()| {
                    tile.row(0)[0] = tile.cols().start + 1;
                },
            );
            assert_eq!(values.iter().sum::<usize>(), n.max(1) * (n.max(1) + 1) / 2);
            if n % 100 == 99 {
                // Long enough for the workers to park.
                thread::sleep(std::time::Duration::from_millis(2));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_stays_usable() {
        let mut pool = ThreadPool::<()>::new(3, SPIN_TIME).unwrap();
        let grid = Grid::new(&View::rows(Buffer::INTERNAL, 1, 64), 1, 1, 1);
        for bad in [0, 5, 63] {
            let mut values = vec![0; 64];
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.tiles(&mut values, grid, |tile, ()| assert_ne!(tile.cols().start, bad));
            }));
            assert!(result.is_err());
            pool.tiles(&mut values, grid, |mut tile, ()| tile.row(0)[0] = 7);
            assert_eq!(values, vec![7; 64]);
        }
    }

    #[test]
    fn an_invalid_number_of_threads_is_an_error() {
        assert!(ThreadPool::<()>::new(0, SPIN_TIME).is_err());
        assert!(ThreadPool::<()>::new(1 << 20, SPIN_TIME).is_err());
    }
}
