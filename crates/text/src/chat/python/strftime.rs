//! `strftime`: formatting of UTC dates as in Python.

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Python's `datetime.strftime` for seconds since 1970 in UTC, in English, with the directives for
/// dates and times. `%-d` and the like omit leading zeros.
pub(super) fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    let (day, time) = (seconds / 86_400, seconds % 86_400);
    let (year, month, date) = civil(day);
    let weekday = DAYS[(day + 4) as usize % 7];
    let month_name = MONTHS[month as usize - 1];
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    let noon_based = (hour + 11) % 12 + 1;

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let bare = directive == Some('-');
        if bare {
            directive = chars.next();
        }
        let mut number = |value: u64, width: usize| {
            let width = if bare { 0 } else { width };
            out.push_str(&format!("{value:0width$}"));
        };
        match directive {
            Some('Y') => number(year, 4),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(date, 2),
            Some('H') => number(hour, 2),
            Some('I') => number(noon_based, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('j') => number(day + 1 - days_before(year), 3),
            Some('F') => out.push_str(&format!("{year:04}-{month:02}-{date:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&weekday[..3]),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('Z') => out.push_str("UTC"),
            Some('z') => out.push_str("+0000"),
            Some('%') => out.push('%'),
            other => {
                return Err(format!(
                    "strftime_now({format:?}): %{} is not known",
                    other.unwrap_or(' ')
                ));
            }
        }
    }
    Ok(out)
}

/// Year, month and day of the month of a day counted from 1970-01-01, in the Gregorian calendar.
fn civil(day: u64) -> (u64, u64, u64) {
    // A year has at least 365 days, so this estimate is never too early. Step back if too late.
    let mut year = 1970 + day / 365;
    while days_before(year) > day {
        year -= 1;
    }
    let leap = u64::from(days_before(year + 1) - days_before(year) == 366);
    let mut date = day - days_before(year);
    let mut month = 1;
    for length in [31, 28 + leap, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if date < length {
            break;
        }
        date -= length;
        month += 1;
    }
    (year, month, date + 1)
}

/// Days from 1970-01-01 to the first of January of `year`.
fn days_before(year: u64) -> u64 {
    let leaps = |before: u64| before / 4 - before / 100 + before / 400;
    (year - 1970) * 365 + leaps(year - 1) - leaps(1969)
}

#[cfg(test)]
mod tests {
    use super::strftime;

    /// Expected values are from Python's `datetime`.
    #[test]
    fn matches_python() {
        let format = "%Y-%m-%d %H:%M:%S %j %A %a %B %b %I %p %y %-d %-m %F %T %%";
        let cases = [
            (
                0,
                "1970-01-01 00:00:00 001 Thursday Thu January Jan 12 AM 70 1 1 1970-01-01 00:00:00 %",
            ),
            (
                951_827_696,
                "2000-02-29 12:34:56 060 Tuesday Tue February Feb 12 PM 00 29 2 2000-02-29 12:34:56 %",
            ),
            (
                1_767_225_599,
                "2025-12-31 23:59:59 365 Wednesday Wed December Dec 11 PM 25 31 12 2025-12-31 23:59:59 %",
            ),
            (
                4_107_542_400,
                "2100-03-01 00:00:00 060 Monday Mon March Mar 12 AM 00 1 3 2100-03-01 00:00:00 %",
            ),
        ];
        for (seconds, expected) in cases {
            assert_eq!(strftime(format, seconds).unwrap(), expected);
        }
        assert!(strftime("%Q", 0).unwrap_err().contains("%Q"));
        assert!(strftime("%", 0).is_err());
    }
}
