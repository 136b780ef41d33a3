//! Tokenizers of models whose weights are not loaded.

use moeflux_binding::{
    OpenOptions, RequestOptions, Tokenizer, chat_tokens, decode, encode,
    messages as parse_messages, token_bytes,
};
use pyo3::{prelude::*, types::PyBytes};

use crate::calls::{detached, parsed};

#[pyclass(frozen)]
pub(crate) struct NativeTokenizer(Tokenizer);

#[pymethods]
impl NativeTokenizer {
    #[staticmethod]
    fn open(py: Python<'_>, path: &str, options: &str) -> PyResult<Self> {
        let options: OpenOptions = parsed(options)?;
        detached(py, None, |_| Tokenizer::open(path, &options)).map(Self)
    }

    fn encode(&self, py: Python<'_>, text: &str, add_special: bool) -> PyResult<Vec<u32>> {
        detached(py, None, |_| encode(self.0.text(), text, add_special))
    }

    fn decode(&self, py: Python<'_>, tokens: Vec<u32>, skip_special: bool) -> PyResult<String> {
        detached(py, None, |_| decode(self.0.text(), &tokens, skip_special))
    }

    fn token_bytes<'py>(&self, py: Python<'py>, token: u32) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = detached(py, None, |_| token_bytes(self.0.text(), token))?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn chat_tokens(
        &self,
        py: Python<'_>,
        messages: &str,
        options: &str,
    ) -> PyResult<(Vec<u32>, Vec<usize>)> {
        let options: RequestOptions = parsed(options)?;
        detached(py, None, |_| chat_tokens(self.0.text(), &parse_messages(messages)?, &options))
    }

    fn vocab_size(&self) -> usize {
        self.0.vocab()
    }

    fn end_tokens(&self) -> Vec<u32> {
        self.0.text().end().ids().to_vec()
    }
}
