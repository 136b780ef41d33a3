//! `GET /v1/models`, also in Anthropic's form.

use std::sync::Arc;

use axum::{
    extract::{Path, State},
    response::Response,
};
use serde::Serialize;

use crate::{app::App, json};

/// A model with the fields of both APIs.
#[derive(Serialize)]
struct ModelEntry<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    #[serde(rename = "type")]
    kind: &'static str,
    display_name: &'a str,
    created_at: String,
    /// Tokens of a prompt and its answer.
    context_length: usize,
}

/// The models, of which there is one.
#[derive(Serialize)]
struct ModelList<'a> {
    object: &'static str,
    data: [ModelEntry<'a>; 1],
    first_id: &'a str,
    last_id: &'a str,
    has_more: bool,
}

impl<'a> ModelEntry<'a> {
    fn new(app: &App, id: &'a str) -> Self {
        Self {
            id,
            object: "model",
            created: app.created,
            owned_by: "moeflux",
            kind: "model",
            display_name: id,
            created_at: timestamp(app.created),
            context_length: app.core.engine().plan().context,
        }
    }
}

/// Answers `GET /v1/models`.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Response {
    let id = app.model.as_str();
    let data = [ModelEntry::new(&app, id)];
    json::response(&ModelList { object: "list", data, first_id: id, last_id: id, has_more: false })
}

/// Answers `GET /v1/models/ID`. Any name is the model's, as in requests.
pub(crate) async fn retrieve(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response {
    json::response(&ModelEntry::new(&app, &id))
}

/// Time in the form of RFC 3339, from seconds since 1970.
pub(crate) fn timestamp(seconds: u64) -> String {
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // Civil date by Howard Hinnant's `civil_from_days`, for days since 1970.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_follow_the_calendar() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00Z");
        assert_eq!(timestamp(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(timestamp(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(timestamp(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(timestamp(1_735_689_599), "2024-12-31T23:59:59Z");
    }
}
