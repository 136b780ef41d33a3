//! Tools and calls in the form of OpenAI's API.

use std::borrow::Cow;

use moeflux::text::{Tool, ToolCall, ToolSet};
use serde_json::{Value, json};

use crate::{
    requests::form::RequiredCalls,
    transport::{
        error::ApiError,
        json::{Fields, Json, mended, wrong_type},
    },
};

/// Kind of tools that models call. Others are run by OpenAI's servers.
const FUNCTION: &str = "function";

/// Tools of a request that are functions.
///
/// # Errors
/// A tool has no name, or a wrong type.
pub(crate) fn parse(fields: &Fields<'_>) -> Result<ToolSet, ApiError> {
    if fields.list("functions")?.is_some_and(|list| !list.is_empty()) {
        let message = "functions is the former name of tools: send tools";
        return Err(ApiError::invalid("functions", message));
    }
    let mut tools = ToolSet::default();
    for (i, value) in fields.list("tools")?.unwrap_or_default().iter().enumerate() {
        let entry = Fields::at(value, &format!("tools[{i}]"))?;
        if entry.text("type")?.is_some_and(|kind| kind != FUNCTION) {
            continue;
        }
        let function = entry.object(FUNCTION)?.ok_or_else(|| entry.missing(FUNCTION))?;
        let tool = tool(&function, "parameters")?;
        tools.tools.push(tool.strict(function.flag("strict")?.unwrap_or(false)));
    }
    Ok(tools)
}

/// A tool with `name`, `description` and a schema in the field `schema`.
///
/// # Errors
/// A field has a wrong type, or there is no name.
pub(crate) fn tool(fields: &Fields<'_>, schema: &str) -> Result<Tool, ApiError> {
    let name = name(fields)?;
    let parameters = match fields.get(schema).and_then(Json::as_bool) {
        // A schema that allows everything.
        Some(true) => json!({"type": "object"}),
        _ => match fields.map(schema)? {
            Some(schema) => Value::Object(schema),
            None => json!({"type": "object", "properties": {}}),
        },
    };
    Ok(Tool::new(name, parameters).description(fields.text("description")?.unwrap_or_default()))
}

fn name<'a>(fields: &Fields<'a>) -> Result<Cow<'a, str>, ApiError> {
    let name = fields.text("name")?.ok_or_else(|| fields.missing("name"))?;
    match name.is_empty() {
        true => Err(wrong_type(&fields.path("name"), "the name of a tool, not empty")),
        false => Ok(name),
    }
}

/// Whether the model may call tools, by `tool_choice`.
///
/// # Errors
/// The choice is unknown.
pub(crate) fn allows_calls(fields: &Fields<'_>) -> Result<bool, ApiError> {
    Ok(required_calls(fields)?.is_some()
        || fields.get("tool_choice").and_then(Json::as_str).as_deref() != Some("none"))
}

/// Calls that the answer must make, by `tool_choice`.
///
/// # Errors
/// The choice is unknown, or names no tool.
pub(crate) fn required_calls(fields: &Fields<'_>) -> Result<Option<RequiredCalls>, ApiError> {
    let wrong = || wrong_type("tool_choice", "auto, none, required or a tool");
    let Some(choice) = fields.get("tool_choice") else { return Ok(None) };
    match choice.as_str().as_deref() {
        Some("auto" | "none") => return Ok(None),
        Some("required" | "any") => return Ok(Some(RequiredCalls::Any)),
        None if choice.is_object() => {}
        _ => return Err(wrong()),
    }
    let choice = fields.object("tool_choice")?.ok_or_else(wrong)?;
    match choice.text("type")?.as_deref() {
        Some("any") => Ok(Some(RequiredCalls::Any)),
        Some("allowed_tools") => allowed_tools(&choice).map(Some),
        Some(FUNCTION | "tool") | None => {
            Ok(Some(RequiredCalls::Named(vec![chosen(&choice)?.into_owned()])))
        }
        Some(_) => Err(wrong()),
    }
}

/// Name of a tool in the form of a choice.
fn chosen<'a>(choice: &Fields<'a>) -> Result<Cow<'a, str>, ApiError> {
    match choice.object(FUNCTION)? {
        Some(function) => name(&function),
        None => name(choice),
    }
}

/// Calls of some of the tools. Only required ones can be told apart from others.
fn allowed_tools(choice: &Fields<'_>) -> Result<RequiredCalls, ApiError> {
    let inner = choice.object("allowed_tools")?;
    let choice = inner.as_ref().unwrap_or(choice);
    if choice.text("mode")?.as_deref() != Some("required") {
        return Err(wrong_type(&choice.path("mode"), "required"));
    }
    let list = choice.list("tools")?.ok_or_else(|| choice.missing("tools"))?;
    let path = choice.path("tools");
    let tool = |(i, value)| Ok(chosen(&Fields::at(value, &format!("{path}[{i}]"))?)?.into_owned());
    let names = list.iter().enumerate().map(tool).collect::<Result<_, ApiError>>()?;
    Ok(RequiredCalls::Named(names))
}

/// Calls of an earlier answer. The former `function_call` is one whose id is its name. The id of a
/// call without one is empty.
///
/// # Errors
/// A call has no name, or a wrong type.
pub(crate) fn calls(message: &Fields<'_>) -> Result<Vec<ToolCall>, ApiError> {
    let mut calls = Vec::new();
    if let Some(function) = message.object("function_call")? {
        let name = name(&function)?;
        calls.push(call(&name, &name, &function)?);
    }
    let path = message.path("tool_calls");
    for (i, value) in message.list("tool_calls")?.unwrap_or_default().iter().enumerate() {
        let entry = Fields::at(value, &format!("{path}[{i}]"))?;
        let id = entry.text("id")?.unwrap_or_default();
        let function = entry.object(FUNCTION)?.ok_or_else(|| entry.missing(FUNCTION))?;
        calls.push(call(&id, &name(&function)?, &function)?);
    }
    Ok(calls)
}

/// A call with the field `arguments`: JSON text, an object, or nothing.
///
/// # Errors
/// The arguments are something else.
pub(crate) fn call(id: &str, name: &str, function: &Fields<'_>) -> Result<ToolCall, ApiError> {
    let arguments = match function.get("arguments").map(|value| (value.as_str(), value)) {
        None => "{}".to_owned(),
        Some((Some(text), _)) if text.trim().is_empty() => "{}".to_owned(),
        Some((Some(text), _)) => mended(text.into_owned()),
        Some((None, object)) if object.is_object() => object.compact(),
        Some(_) => return Err(wrong_type(&function.path("arguments"), "JSON text")),
    };
    Ok(ToolCall { id: id.to_owned(), name: name.to_owned(), arguments })
}
