//! Formats of strings that are enforced. Each has a longest length, so that no answer goes on
//! without an end.

/// A format and the strings that it allows.
#[derive(Debug)]
pub(super) struct StringFormat {
    pub(super) name: &'static str,
    /// Regular expression of the whole string.
    pub(super) pattern: &'static str,
}

macro_rules! date {
    () => {
        concat!(
            "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
            "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))",
            // Leap years.
            "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])",
            "|(?:[02468][048]|[13579][26])00)-02-29)"
        )
    };
}

macro_rules! time {
    () => {
        concat!(
            "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?",
            "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
        )
    };
}

macro_rules! label {
    () => {
        "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    };
}

macro_rules! byte {
    () => {
        "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
    };
}

macro_rules! ipv4 {
    () => {
        concat!("(?:", byte!(), "\\.){3}", byte!())
    };
}

macro_rules! ipv6 {
    () => {
        concat!(
            "(?:(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
            "|(?:[0-9a-fA-F]{1,4}:){1,7}:",
            "|(?:[0-9a-fA-F]{1,4}:){1,6}:[0-9a-fA-F]{1,4}",
            "|(?:[0-9a-fA-F]{1,4}:){1,5}(?::[0-9a-fA-F]{1,4}){1,2}",
            "|(?:[0-9a-fA-F]{1,4}:){1,4}(?::[0-9a-fA-F]{1,4}){1,3}",
            "|(?:[0-9a-fA-F]{1,4}:){1,3}(?::[0-9a-fA-F]{1,4}){1,4}",
            "|(?:[0-9a-fA-F]{1,4}:){1,2}(?::[0-9a-fA-F]{1,4}){1,5}",
            "|[0-9a-fA-F]{1,4}:(?::[0-9a-fA-F]{1,4}){1,6}",
            "|:(?::[0-9a-fA-F]{1,4}){1,7}|::)"
        )
    };
}

/// All formats that are enforced. Others say nothing about the strings.
static FORMATS: [StringFormat; 10] = [
    StringFormat { name: "date", pattern: concat!("^(?:", date!(), ")$") },
    StringFormat { name: "time", pattern: concat!("^(?:", time!(), ")$") },
    StringFormat { name: "date-time", pattern: concat!("^(?:", date!(), "[tT]", time!(), ")$") },
    StringFormat {
        name: "duration",
        pattern: concat!(
            "^P(?:[0-9]{1,9}W|(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?",
            "|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)",
            "(?:T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?",
            "|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S))?",
            "|T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?",
            "|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S))$"
        ),
    },
    StringFormat {
        name: "email",
        pattern: concat!(
            "^[a-zA-Z0-9!#$%&'*+\\-/=?\\^_`{|}~]{1,32}",
            "(?:\\.[a-zA-Z0-9!#$%&'*+\\-/=?\\^_`{|}~]{1,32}){0,3}",
            "@(?:",
            label!(),
            "\\.){0,7}",
            label!(),
            "$"
        ),
    },
    StringFormat {
        name: "hostname",
        pattern: concat!("^(?:", label!(), "\\.){0,7}", label!(), "$"),
    },
    StringFormat { name: "ipv4", pattern: concat!("^", ipv4!(), "$") },
    StringFormat { name: "ipv6", pattern: concat!("^", ipv6!(), "$") },
    StringFormat {
        name: "uuid",
        pattern: "^[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$",
    },
    StringFormat {
        name: "uri",
        pattern: concat!(
            "^[a-zA-Z][a-zA-Z0-9+\\-.]{0,31}:(?:",
            // Authority: user, host, port.
            "//(?:(?:[a-zA-Z0-9\\-._~!$&'()*+,;=:]|%[0-9a-fA-F]{2}){0,128}@)?",
            "(?:\\[",
            ipv6!(),
            "\\]|(?:[a-zA-Z0-9\\-._~!$&'()*+,;=]|%[0-9a-fA-F]{2}){0,255})",
            "(?::[0-9]{0,5})?",
            "(?:/(?:[a-zA-Z0-9\\-._~!$&'()*+,;=:@/]|%[0-9a-fA-F]{2}){0,1024})?",
            // A path without authority does not begin with two slashes.
            "|/?(?:[a-zA-Z0-9\\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})",
            "(?:[a-zA-Z0-9\\-._~!$&'()*+,;=:@/]|%[0-9a-fA-F]{2}){0,1024}|/?)",
            "(?:\\?(?:[a-zA-Z0-9\\-._~!$&'()*+,;=:@/?]|%[0-9a-fA-F]{2}){0,1024})?",
            "(?:#(?:[a-zA-Z0-9\\-._~!$&'()*+,;=:@/?]|%[0-9a-fA-F]{2}){0,256})?$"
        ),
    },
];

/// The format of a name, if it is enforced.
pub(super) fn known(name: &str) -> Option<&'static StringFormat> {
    FORMATS.iter().find(|format| format.name == name)
}
