//! Images in a step: rows in place of embeddings, rows that are added after the first layers, and
//! the positions of all rows.

use moeflux_base::Error;
use moeflux_compute::{Buffer, Device, Op, ROPE_AXES, View};
use moeflux_model::blueprint::{Blueprint, ImageInputs};

use super::{contents::position_ids, layer::RowPositions, spans::SeqSpan};

/// Images of a step.
pub(super) struct StepImages {
    /// Rows on their way to the residual stream, `(rows, hidden)`.
    buffer: Buffer,
    hidden: usize,
    /// Number of the first layers after which rows are added.
    deepstack: usize,
    /// Whether positions have time, row and column.
    has_axes: bool,
    /// Rows of the current step that belong to images.
    rows: Vec<u32>,
    /// Positions of its rows, if there are images among them.
    ids: Vec<[u32; ROPE_AXES]>,
    /// By span, if there are none: positions that earlier images have saved. Empty for none.
    saved: Vec<usize>,
}

impl StepImages {
    /// Images of steps of `rows` rows; `None` for a model of text alone.
    pub(super) fn new(
        blueprint: &Blueprint,
        rows: usize,
        device: &mut dyn Device,
    ) -> Result<Option<Self>, Error> {
        let Some(ImageInputs { deepstack, .. }) = blueprint.images else { return Ok(None) };
        let hidden = blueprint.hidden;
        let buffer = device.buffer(rows * hidden).map_err(Error::at(|| "rows of images"))?;
        let has_axes = blueprint.has_position_axes();
        let (rows, ids, saved) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Some(Self { buffer, hidden, deepstack, has_axes, rows, ids, saved }))
    }

    /// Bytes of the buffer.
    pub(super) fn bytes(blueprint: &Blueprint, rows: usize) -> u64 {
        blueprint.images.map_or(0, |_| 4 * (rows * blueprint.hidden) as u64)
    }

    /// Takes the images of a step.
    pub(super) fn start(&mut self, spans: &[SeqSpan<'_>]) {
        self.rows.clear();
        self.ids.clear();
        self.saved.clear();
        let mut first = 0;
        for span in spans {
            let tokens = span.image_parts().flat_map(|part| part.tokens());
            self.rows.extend(tokens.map(|token| (first + token) as u32));
            first += span.rows();
        }
        if !self.has_axes {
            return;
        }
        if !self.rows.is_empty() {
            for span in spans {
                let indices = span.position..span.position + span.rows();
                self.ids.extend(indices.map(|index| position_ids(span.contents, index)));
            }
        } else if spans.iter().any(|span| span.saved_positions() > 0) {
            self.saved.extend(spans.iter().map(SeqSpan::saved_positions));
        }
    }

    /// Positions of the step's rows.
    pub(super) fn positions(&self) -> RowPositions<'_> {
        match (&*self.ids, &*self.saved) {
            ([], []) => RowPositions::Indices,
            ([], saved) => RowPositions::Text { saved },
            (ids, _) => RowPositions::Images { ids },
        }
    }

    /// Puts the rows of images in the place of their embeddings.
    pub(super) fn insert(
        &self,
        device: &mut dyn Device,
        spans: &[SeqSpan<'_>],
        x: View,
    ) -> Result<(), Error> {
        self.scatter(device, spans, None, x)
    }

    /// Adds the rows of images that follow a layer.
    pub(super) fn add_after(
        &self,
        layer: usize,
        device: &mut dyn Device,
        spans: &[SeqSpan<'_>],
        x: View,
    ) -> Result<(), Error> {
        match layer < self.deepstack {
            true => self.scatter(device, spans, Some(layer), x),
            false => Ok(()),
        }
    }

    fn scatter(
        &self,
        device: &mut dyn Device,
        spans: &[SeqSpan<'_>],
        deepstack: Option<usize>,
        out: View,
    ) -> Result<(), Error> {
        if self.rows.is_empty() {
            return Ok(());
        }
        let x = View::rows(self.buffer, self.rows.len(), self.hidden);
        let mut done = 0;
        let mut scatter = || {
            for part in spans.iter().flat_map(SeqSpan::image_parts) {
                let count = part.tokens().len();
                device.write_view(x.slice(done, count), part.values(deepstack))?;
                done += count;
            }
            let (rows, add) = (&*self.rows, deepstack.is_some());
            device.run(&Op::ScatterRows { x, rows, add, out })
        };
        scatter().map_err(Error::at(|| "rows of images"))
    }
}
