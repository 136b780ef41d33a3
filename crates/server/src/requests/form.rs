//! Forms of answers that a request asks for.

use moeflux::text::AnswerForm;

use crate::transport::{
    error::ApiError,
    json::{Fields, Json, JsonText, wrong_type},
};

/// Form of an answer, and the field that asks for it.
#[derive(Clone, Debug)]
pub(crate) struct AskedForm {
    pub(super) form: AnswerForm,
    pub(super) path: String,
    /// Whether keywords of a schema that cannot be enforced are left out.
    pub(super) lenient: bool,
}

/// Rules of all schemas of a server.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FormRules {
    /// Whether keywords that cannot be enforced are left out.
    pub(crate) lenient: bool,
    /// Whether objects may have properties that they do not list, if they do not say.
    pub(crate) open_objects: bool,
}

/// Calls that an answer must make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RequiredCalls {
    /// Calls of any tools.
    Any,
    /// Calls of these tools.
    Named(Vec<String>),
}

/// Fields of vLLM that ask for a form, beside its `structured_outputs`.
const GUIDED: [&str; 4] = ["guided_json", "guided_regex", "guided_choice", "guided_grammar"];

impl AskedForm {
    fn new(form: AnswerForm, path: impl Into<String>) -> Self {
        Self { form, path: path.into(), lenient: false }
    }

    /// The form, whose keywords may be left out if the field `strict` is false.
    fn unless_strict(self, fields: &Fields<'_>) -> Result<Self, ApiError> {
        Ok(Self { lenient: fields.flag("strict")? == Some(false), ..self })
    }

    fn schema(fields: &Fields<'_>, name: &str) -> Result<Self, ApiError> {
        let schema = fields.get(name).ok_or_else(|| fields.missing(name))?;
        let path = fields.path(name);
        let wrong = || wrong_type(&path, "a JSON schema");
        let schema = match schema.as_str() {
            // Clients of vLLM send it as text, too.
            Some(text) => {
                let text = JsonText::new(text.into_owned().into()).map_err(|_| wrong())?;
                text.value().to_value().map_err(|_| wrong())?
            }
            None if schema.is_object() || schema.as_bool().is_some() => {
                fields.value(name)?.ok_or_else(wrong)?
            }
            None => return Err(wrong()),
        };
        Ok(Self::new(AnswerForm::Json(schema), path))
    }

    fn choice(fields: &Fields<'_>, name: &str) -> Result<Self, ApiError> {
        let path = fields.path(name);
        let wrong = || wrong_type(&path, "a list of strings, not empty");
        let list = fields.list(name)?.unwrap_or_default();
        let texts = list.iter().map(|text| text.as_str());
        let texts = texts.collect::<Option<Vec<_>>>();
        let texts = texts.filter(|texts| !texts.is_empty()).ok_or_else(wrong)?;
        Ok(Self::new(AnswerForm::choice(texts), path))
    }

    fn text(
        fields: &Fields<'_>,
        name: &str,
        form: fn(String) -> AnswerForm,
    ) -> Result<Self, ApiError> {
        let text = fields.text(name)?.ok_or_else(|| fields.missing(name))?;
        Ok(Self::new(form(text.into_owned()), fields.path(name)))
    }

    /// Form of one key of `structured_outputs`, or of the field `name` that stands for it.
    fn structured(fields: &Fields<'_>, name: &str, key: &str) -> Result<Option<Self>, ApiError> {
        match key {
            "json" => Self::schema(fields, name),
            "regex" => Self::text(fields, name, AnswerForm::Regex),
            "choice" => Self::choice(fields, name),
            "grammar" => Self::text(fields, name, grammar),
            "lark" => Self::text(fields, name, AnswerForm::Lark),
            "json_object" => match fields.flag(name)? {
                Some(true) => Ok(Self::new(AnswerForm::json_object(), fields.path(name))),
                _ => return Ok(None),
            },
            _ => {
                let path = fields.path(name);
                let message = format!(
                    "{path} is not supported: send json, json_object, regex, choice or lark"
                );
                return Err(ApiError::invalid(path, message));
            }
        }
        .map(Some)
    }

    /// Form in the fields of OpenAI's API, and of servers that extend it.
    ///
    /// # Errors
    /// A field has a wrong type or is not supported, or several fields ask for a form.
    pub(crate) fn openai(fields: &Fields<'_>) -> Result<Option<Self>, ApiError> {
        let mut forms = Vec::new();
        if fields.text("grammar")?.is_some_and(|grammar| !grammar.is_empty()) {
            forms.push(Self::text(fields, "grammar", AnswerForm::Gbnf)?);
        }
        if let Some(format) = fields.object("response_format")? {
            forms.extend(Self::response_format(&format)?);
        }
        if fields.get("json_schema").is_some() {
            forms.push(Self::schema(fields, "json_schema")?);
        }
        if let Some(outputs) = fields.object("structured_outputs")? {
            // A neutral value asks for nothing.
            for key in outputs.names().filter(|key| outputs.get(key).is_some_and(is_asked)) {
                forms.extend(Self::structured(&outputs, key, key)?);
            }
        }
        for name in GUIDED.into_iter().filter(|name| fields.get(name).is_some()) {
            forms.extend(Self::structured(fields, name, &name["guided_".len()..])?);
        }
        match forms.len() {
            0 | 1 => Ok(forms.pop()),
            _ => {
                let message = format!("{} and {}: send one", forms[0].path, forms[1].path);
                Err(ApiError::invalid(forms[1].path.clone(), message))
            }
        }
    }

    /// Form of `response_format`, or of `text.format` of a response.
    ///
    /// # Errors
    /// A field has a wrong type, or the type is unknown.
    pub(crate) fn response_format(format: &Fields<'_>) -> Result<Option<Self>, ApiError> {
        match &*format.text("type")?.ok_or_else(|| format.missing("type"))? {
            "text" => Ok(None),
            // As llama.cpp's server has it.
            "json_object" if format.get("schema").is_some() => {
                Self::schema(format, "schema").map(Some)
            }
            "json_object" => Ok(Some(Self::new(AnswerForm::json_object(), format.path("type")))),
            "json_schema" => match format.object("json_schema")? {
                Some(named) => Self::schema(&named, "schema")?.unless_strict(&named).map(Some),
                None => Self::schema(format, "schema")?.unless_strict(format).map(Some),
            },
            "regex" => Self::text(format, "regex", AnswerForm::Regex).map(Some),
            "lark" => Self::text(format, "lark", AnswerForm::Lark).map(Some),
            other => {
                let path = format.path("type");
                let kinds = "text, json_object, json_schema, regex or lark";
                let message = format!("{path} is {other:?}: it must be {kinds}");
                Err(ApiError::invalid(path, message))
            }
        }
    }

    /// Form in the field `format` of Ollama's API: `json`, or a schema.
    ///
    /// # Errors
    /// The field is neither.
    pub(crate) fn ollama(fields: &Fields<'_>) -> Result<Option<Self>, ApiError> {
        let Some(format) = fields.get("format") else { return Ok(None) };
        match format.as_str().as_deref() {
            Some("") => Ok(None),
            Some("json") => Ok(Some(Self::new(AnswerForm::json_object(), "format"))),
            None if format.is_object() => {
                Ok(Some(Self { lenient: true, ..Self::schema(fields, "format")? }))
            }
            _ => Err(wrong_type("format", "json or a JSON schema")),
        }
    }

    /// Form in the field `name` of Anthropic's API.
    ///
    /// # Errors
    /// The field has a wrong type.
    pub(crate) fn anthropic(fields: &Fields<'_>, name: &str) -> Result<Option<Self>, ApiError> {
        let Some(format) = fields.object(name)? else { return Ok(None) };
        match &*format.text("type")?.ok_or_else(|| format.missing("type"))? {
            "json_schema" => Self::schema(&format, "schema").map(Some),
            other => {
                let path = format.path("type");
                let message = format!("{path} is {other:?}: it must be json_schema");
                Err(ApiError::invalid(path, message))
            }
        }
    }
}

/// Whether the value of a key asks for a form.
fn is_asked(value: Json<'_>) -> bool {
    value.as_bool() != Some(false)
}

/// A grammar in either notation that vLLM takes.
fn grammar(text: String) -> AnswerForm {
    if text.contains("::=") { AnswerForm::Gbnf(text) } else { AnswerForm::Lark(text) }
}
