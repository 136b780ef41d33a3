//! Tokenizers of models whose weights are not loaded.

use moeflux::Message;
use moeflux_binding::{Fault, OpenOptions, RequestOptions, Tokenizer};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyBytes};

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
        detached(py, None, |_| {
            Ok(match add_special {
                true => self.0.text().encode(text)?,
                false => self.0.text().encode_continuation(text)?,
            })
        })
    }

    fn decode(&self, py: Python<'_>, tokens: Vec<u32>, skip_special: bool) -> PyResult<String> {
        let decode = || Ok(self.0.text().tokenizer().decode(&tokens, skip_special)?);
        detached(py, None, |_| decode())
    }

    fn token_bytes<'py>(&self, py: Python<'py>, token: u32) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.0.text().tokenizer().token_bytes(token);
        let bytes = bytes.ok_or_else(|| PyValueError::new_err(format!("no token {token}")))?;
        Ok(PyBytes::new(py, &bytes))
    }

    fn chat_tokens(
        &self,
        py: Python<'_>,
        messages: &str,
        options: &str,
    ) -> PyResult<(Vec<u32>, Vec<usize>)> {
        let messages: Vec<Message> = parsed(messages)?;
        let options: RequestOptions = parsed(options)?;
        let prompt = || -> Result<_, Fault> {
            let prompt = self.0.text().prompt(&messages, &options.chat())?;
            Ok((prompt.tokens, prompt.ends))
        };
        detached(py, None, |_| prompt())
    }

    fn vocab_size(&self) -> usize {
        self.0.vocab()
    }

    fn end_tokens(&self) -> Vec<u32> {
        self.0.text().end().ids().to_vec()
    }
}
