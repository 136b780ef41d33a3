//! Row store: reads the rows of a step's tokens from tables on disk, ahead of the layers that use
//! them.
//!
//! Rows follow from token ids alone, so their reads start with the step. Each row is read once per
//! step, in batches that the read queue splits into reads of one row each: mirrors, retries and
//! timeouts are those of experts, and files are opened again after a read error. Nothing is kept
//! between steps but the system's page cache, so results do not depend on earlier steps.

#[cfg(test)]
mod tests;

use std::{path::PathBuf, sync::Arc, time::Instant};

use moeflux_base::Error;
use moeflux_compute::Bytes;
use moeflux_model::{
    blueprint::Blueprint,
    checkpoint::{Checkpoint, RowTable, Segment},
    ngram::NgramHash,
    seam::DataFile,
};

use super::{
    io::{Completion, QUEUE_SLOT_BYTES, ReadRequest, Reader, Urgency},
    row_batches::RowBatches,
};
use crate::experts::stats::{ReadCounters, Stats};

/// Rows of a batch. A batch is one request and one allocation.
const BATCH_ROWS: usize = 256;

/// Tokens of one sequence in a step, and those before them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NgramSpan<'a> {
    pub(crate) before: &'a [u32],
    pub(crate) tokens: &'a [u32],
}

/// Opens a reader of batches of rows, for this number of slots.
pub(crate) type OpenRowReader<'a> =
    dyn Fn(&Arc<RowBatches>, usize) -> Result<Box<dyn Reader>, Error> + 'a;

/// Rows of the tables of a model.
pub(crate) struct RowStore {
    batches: Arc<RowBatches>,
    tables: Vec<TableRows>,
    reader: Box<dyn Reader>,
    /// By slot; `None` while a read owns it.
    memory: Vec<Option<Bytes>>,
    in_flight: usize,
    /// First error of the step's reads.
    failed: Option<Error>,
    /// Whether a read has failed since the files were opened.
    has_failed_reads: bool,
    /// The reader's counters that are in statistics.
    counters: ReadCounters,
}

/// The tables of a model in files that were opened again, and their reader.
pub(crate) struct ReopenedRows {
    batches: Arc<RowBatches>,
    reader: Box<dyn Reader>,
}

/// Files of a model, and folders with copies of some of them.
#[derive(Clone, Copy)]
struct ModelFiles<'a> {
    own: &'a Arc<Vec<DataFile>>,
    mirrors: &'a [PathBuf],
}

impl<'a> ModelFiles<'a> {
    fn new(checkpoint: &'a Checkpoint) -> Self {
        Self { own: checkpoint.files(), mirrors: checkpoint.mirrors() }
    }

    /// Batches of rows of tables, one for each of `slots` slots. A row has two segments at most.
    fn batches(self, tables: Vec<RowTable>, slots: usize) -> Arc<RowBatches> {
        let (files, mirrors) = (Arc::clone(self.own), self.mirrors.into());
        Arc::new(RowBatches::new(files, mirrors, tables, slots, 2 * BATCH_ROWS))
    }
}

/// A table, and the hash that chooses its rows for a layer.
struct TableSource {
    layer: usize,
    hash: NgramHash,
    table: RowTable,
}

/// A table, and the rows of a step.
struct TableRows {
    layer: usize,
    hash: NgramHash,
    width: usize,
    first_slot: usize,
    /// Rows in the order of tokens and heads.
    wanted: Vec<u64>,
    /// The same rows in ascending order, each once.
    distinct: Vec<u64>,
    /// `(rows, rows per token * width)`.
    values: Vec<f32>,
}

/// Slots of a table for steps of up to `rows` tokens.
fn slots(hash: &NgramHash, rows: usize) -> usize {
    (rows * hash.rows_per_token()).div_ceil(BATCH_ROWS)
}

/// Bytes in memory of a batch.
fn batch_bytes(table: &RowTable) -> usize {
    BATCH_ROWS * table.row_bytes()
}

impl RowStore {
    /// Bytes in host memory for steps of up to `rows` tokens, without the reader's; zero without
    /// tables.
    pub(crate) fn bytes(blueprint: &Blueprint, rows: usize) -> u64 {
        let segment = 2 * size_of::<Segment>();
        let tables = blueprint.memories().map(|(_, memory)| {
            let (table, slots) = (&memory.table, slots(&memory.hash, rows));
            let all = rows * memory.hash.rows_per_token();
            let batch = batch_bytes(table).next_multiple_of(4096) + BATCH_ROWS * segment;
            slots * (batch + QUEUE_SLOT_BYTES + size_of::<Bytes>())
                + all * (2 * size_of::<u64>() + table.width * size_of::<f32>())
        });
        tables.sum::<usize>() as u64
    }

    /// A store for steps of up to `rows` tokens; `None` for models without tables.
    ///
    /// # Errors
    /// A mirror differs from the model, or threads or buffers cannot be created.
    pub(crate) fn open(
        checkpoint: &Checkpoint,
        blueprint: &Blueprint,
        rows: usize,
        open_reader: &OpenRowReader<'_>,
    ) -> Result<Option<Self>, Error> {
        let sources = blueprint.memories().map(|(layer, memory)| TableSource {
            layer,
            hash: memory.hash.clone(),
            table: memory.table.clone(),
        });
        let sources: Vec<_> = sources.collect();
        if sources.is_empty() {
            return Ok(None);
        }
        Self::of_tables(ModelFiles::new(checkpoint), sources, rows, open_reader).map(Some)
    }

    fn of_tables(
        files: ModelFiles<'_>,
        sources: Vec<TableSource>,
        rows: usize,
        open_reader: &OpenRowReader<'_>,
    ) -> Result<Self, Error> {
        let (mut tables, mut locations, mut memory) = (Vec::new(), Vec::new(), Vec::new());
        for TableSource { layer, hash, table } in sources {
            let all = rows * hash.rows_per_token();
            let first_slot = memory.len();
            for _ in 0..slots(&hash, rows) {
                let bytes = Bytes::zeroed(batch_bytes(&table));
                memory.push(Some(bytes.map_err(Error::at(|| "buffers for rows"))?));
            }
            tables.push(TableRows {
                layer,
                hash,
                width: table.width,
                first_slot,
                wanted: Vec::with_capacity(all),
                distinct: Vec::with_capacity(all),
                values: vec![0.0; all * table.width],
            });
            locations.push(table);
        }
        let batches = files.batches(locations, memory.len());
        let reader = open_reader(&batches, memory.len())?;
        Ok(Self {
            batches,
            tables,
            reader,
            memory,
            in_flight: 0,
            failed: None,
            has_failed_reads: false,
            counters: ReadCounters::default(),
        })
    }

    /// Whether a read has failed since the files were opened.
    pub(crate) fn has_failed_reads(&self) -> bool {
        self.has_failed_reads
    }

    /// Opens the tables in the files of a checkpoint. `None` if a row has moved.
    ///
    /// # Errors
    /// As [`RowStore::open`].
    pub(crate) fn reopen(
        &self,
        checkpoint: &Checkpoint,
        blueprint: &Blueprint,
        open_reader: &OpenRowReader<'_>,
    ) -> Result<Option<ReopenedRows>, Error> {
        let tables = || blueprint.memories().map(|(_, memory)| &memory.table);
        if !tables().eq(self.batches.tables()) {
            return Ok(None);
        }
        let slots = self.memory.len();
        let batches = ModelFiles::new(checkpoint).batches(tables().cloned().collect(), slots);
        let reader = open_reader(&batches, slots)?;
        Ok(Some(ReopenedRows { batches, reader }))
    }

    /// Reads from other files with the same content from now on.
    pub(crate) fn replace_reader(&mut self, ReopenedRows { batches, reader }: ReopenedRows) {
        self.finish_reads();
        (self.batches, self.reader, self.has_failed_reads) = (batches, reader, false);
    }

    /// Starts to read the rows of a step's tokens, at most as many as the store was opened for.
    pub(crate) fn start<'a>(
        &mut self,
        spans: impl Iterator<Item = NgramSpan<'a>> + Clone,
        stats: &mut Stats,
    ) -> Result<(), Error> {
        // A failed step may have left some.
        self.finish_reads();
        self.failed = None;
        self.counters = self.reader.counters();
        let Self { batches, tables, reader, memory, in_flight, .. } = self;
        for (t, table) in tables.iter_mut().enumerate() {
            let TableRows { hash, wanted, distinct, first_slot, .. } = table;
            wanted.clear();
            for NgramSpan { before, tokens } in spans.clone() {
                (0..tokens.len()).for_each(|i| wanted.extend(hash.rows(before, tokens, i)));
            }
            distinct.clone_from(wanted);
            distinct.sort_unstable();
            distinct.dedup();
            stats.rows_needed += wanted.len() as u64;
            stats.rows_read += distinct.len() as u64;
            let source = &batches.tables()[t];
            for (i, rows) in distinct.chunks(BATCH_ROWS).enumerate() {
                let slot = *first_slot + i;
                let lost = || Error::internal("a row is beyond its table; please report this");
                if rows.last().is_none_or(|last| source.locate(*last).is_none()) {
                    return Err(lost());
                }
                let segments = rows.iter().filter_map(|row| source.locate(*row));
                batches.set(slot, segments.flat_map(|(shard, row)| shard.segments(row)));
                let bytes = memory.get_mut(slot).and_then(Option::take).ok_or_else(lost)?;
                let urgency = Urgency::Demand;
                reader.start(ReadRequest { layer: t, expert: slot, slot, bytes, urgency });
                *in_flight += 1;
            }
        }
        Ok(())
    }

    /// Waits for all reads in flight.
    fn finish_reads(&mut self) {
        while self.in_flight > 0 {
            let Some(Completion { request, result }) = self.reader.next(true) else {
                let lost = || Error::internal("reads of rows got lost; please report this");
                self.failed.get_or_insert_with(lost);
                return;
            };
            self.in_flight -= 1;
            if let Some(memory) = self.memory.get_mut(request.slot) {
                *memory = Some(request.bytes);
            }
            if let Err(error) = result {
                self.has_failed_reads = true;
                self.failed.get_or_insert(error);
            }
        }
    }

    /// Waits for the rows of a layer's tokens, `(tokens, rows per token * width)`. `None` if none
    /// were started.
    ///
    /// # Errors
    /// A row cannot be read or is not finite.
    pub(crate) fn wait(
        &mut self,
        layer: usize,
        stats: &mut Stats,
    ) -> Result<Option<&[f32]>, Error> {
        if self.in_flight > 0 {
            let since = Instant::now();
            self.finish_reads();
            stats.rows_waited_ns += since.elapsed().as_nanos() as u64;
        }
        let counters = self.reader.counters();
        stats.rows_reading_ns += counters.busy_ns - self.counters.busy_ns;
        stats.row_bytes_read += counters.bytes - self.counters.bytes;
        self.counters = counters;
        if let Some(error) = self.failed.take() {
            self.tables.iter_mut().for_each(|table| table.wanted.clear());
            return Err(error);
        }
        let Some(t) = self.tables.iter().position(|table| table.layer == layer) else {
            return Ok(None);
        };
        let (table, source) = (&mut self.tables[t], &self.batches.tables()[t]);
        if table.wanted.is_empty() {
            return Ok(None);
        }
        let TableRows { width, first_slot, wanted, distinct, values, .. } = table;
        for (row, values) in wanted.iter().zip(values.chunks_exact_mut(*width)) {
            let found = distinct.binary_search(row).ok().and_then(|i| {
                let batch = self.memory.get(*first_slot + i / BATCH_ROWS)?.as_ref()?;
                let (shard, index) = source.locate(*row)?;
                let offset = i % BATCH_ROWS * shard.row_bytes();
                Some((shard, index, batch.get(offset..offset + shard.row_bytes())?))
            });
            let Some((shard, index, bytes)) = found else {
                return Err(Error::internal("a row was not read; please report this"));
            };
            if !shard.decode(bytes, values) {
                return Err(Error::Tensor {
                    tensor: shard.name.clone(),
                    path: self.batches.files()[shard.first.file as usize].path().into(),
                    problem: format!("row {index} has a NaN or infinity: download it again"),
                });
            }
        }
        Ok(values.get(..wanted.len() * *width))
    }
}
