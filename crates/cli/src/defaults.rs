//! `moeflux.toml` of the user: defaults of options.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow, bail};
use clap::{Arg, ArgAction, Command};
use toml::{Table, Value};

use crate::{
    folders,
    settings_text::{self, FILE},
};

/// Variable that names another file; empty for none.
const VARIABLE: &str = "MOEFLUX_CONFIG";

/// Defaults of options, and the file that has them.
#[derive(Debug)]
pub(crate) struct Defaults {
    path: PathBuf,
    table: Table,
}

impl Defaults {
    /// Reads the user's file; `None` if there is none.
    ///
    /// # Errors
    /// The file cannot be read or is not TOML. One that [`VARIABLE`] names must exist.
    pub(crate) fn read() -> anyhow::Result<Option<Self>> {
        let named = env::var_os(VARIABLE).map(PathBuf::from);
        if named.as_ref().is_some_and(|path| path.as_os_str().is_empty()) {
            return Ok(None);
        }
        let own = || folders::settings().map(|folder| folder.join(FILE));
        let Some(path) = named.clone().or_else(own) else { return Ok(None) };
        let text = match settings_text::read(&path)? {
            Some(text) => text,
            None if named.is_none() => return Ok(None),
            None => bail!("{}: cannot be read: there is no such file", path.display()),
        };
        let table = text.parse().map_err(|error: toml::de::Error| {
            anyhow!("{}: {}", path.display(), error.to_string().trim_end())
        })?;
        Ok(Some(Self { path, table }))
    }

    /// Path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives a program's options the file's defaults. A key outside of all tables is for all
    /// commands that have the option, one in the table of a command for this command.
    ///
    /// # Errors
    /// A key is no option, a table no command, or a value has another form.
    pub(crate) fn apply(&self, program: Command) -> anyhow::Result<Command> {
        self.applied(program).with_context(|| self.path.display().to_string())
    }

    fn applied(&self, mut program: Command) -> anyhow::Result<Command> {
        // Those of one command come last, as they are the more special.
        for (key, value) in self.table.iter().filter(|(_, value)| !value.is_table()) {
            program = with_default(program, key, value, Depth::Below)?;
        }
        for (name, value) in &self.table {
            if let Value::Table(table) = value {
                program = with_table(program, name, table)?;
            }
        }
        Ok(program)
    }
}

/// Commands that a default is for.
#[derive(Clone, Copy, PartialEq)]
enum Depth {
    /// The command alone.
    Here,
    /// The command and all below it.
    Below,
}

/// Applies the table of a command below `program`.
fn with_table(program: Command, name: &str, table: &Table) -> anyhow::Result<Command> {
    let Some(command) = program.find_subcommand(name) else {
        bail!("[{name}]: `{}` has no such command", program.get_name());
    };
    let mut command = command.clone();
    for (key, value) in table {
        command = match value {
            Value::Table(table) => with_table(command, key, table)?,
            value => with_default(command, key, value, Depth::Here)?,
        };
    }
    Ok(program.mut_subcommand(name, |_| command))
}

/// Sets the default of the option `--KEY`.
fn with_default(
    command: Command,
    key: &str,
    value: &Value,
    depth: Depth,
) -> anyhow::Result<Command> {
    let options = options(&command, key, depth);
    if options.is_empty() {
        bail!("{key}: `{}` has no option --{key}", command.get_name());
    }
    let values = match value {
        Value::Array(values) => values.iter().map(|value| text(key, value)).collect(),
        value => text(key, value).map(|text| vec![text]),
    };
    let values = values?;
    let takes_many = |option: &&Arg| matches!(option.get_action(), ArgAction::Append);
    if values.len() != 1 && !options.iter().all(takes_many) {
        bail!("{key}: --{key} takes one value");
    }
    Ok(set_default(command, key, &values, depth))
}

/// Options named `key`.
fn options<'a>(command: &'a Command, key: &str, depth: Depth) -> Vec<&'a Arg> {
    let own = command.get_arguments().filter(|arg| arg.get_long() == Some(key));
    let mut found: Vec<_> = own.collect();
    if depth == Depth::Below {
        found.extend(command.get_subcommands().flat_map(|sub| options(sub, key, depth)));
    }
    found
}

fn set_default(command: Command, key: &str, values: &[String], depth: Depth) -> Command {
    let command = command.mut_args(|arg| match arg.get_long() == Some(key) {
        true => arg.default_values(values.to_vec()),
        false => arg,
    });
    match depth {
        Depth::Here => command,
        Depth::Below => command.mut_subcommands(|sub| set_default(sub, key, values, depth)),
    }
}

/// A value as it is written on the command line.
fn text(key: &str, value: &Value) -> anyhow::Result<String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        Value::Boolean(switch) => Ok(switch.to_string()),
        _ => bail!("{key}: a value is a text, a number, true or false"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tiny program: `run --memory --stop`, `bench decode --memory`, and `--quiet` for all.
    fn program() -> Command {
        let option = |name: &'static str| Arg::new(name).long(name);
        let memory = || option("memory").value_parser(clap::value_parser!(u64));
        Command::new("program")
            .arg(option("quiet").action(ArgAction::SetTrue).global(true))
            .subcommand(
                Command::new("run").arg(memory()).arg(option("stop").action(ArgAction::Append)),
            )
            .subcommand(Command::new("bench").subcommand(Command::new("decode").arg(memory())))
    }

    fn applied(text: &str) -> anyhow::Result<Command> {
        Defaults { path: "here/moeflux.toml".into(), table: text.parse().unwrap() }.apply(program())
    }

    fn memory(file: &str, args: &[&str]) -> Option<u64> {
        let matches = applied(file).unwrap().get_matches_from([&["program"], args].concat());
        let (_, mut matches) = matches.subcommand().unwrap();
        while let Some((_, below)) = matches.subcommand() {
            matches = below;
        }
        matches.get_one("memory").copied()
    }

    #[test]
    fn a_default_is_for_all_commands_or_for_one() {
        let both = "memory = 5\n[bench.decode]\nmemory = \"6\"";
        assert_eq!(memory(both, &["run"]), Some(5));
        assert_eq!(memory(both, &["run", "--memory", "7"]), Some(7));
        assert_eq!(memory(both, &["bench", "decode"]), Some(6));
        assert_eq!(memory("[run]\nmemory = 5", &["bench", "decode"]), None);
    }

    #[test]
    fn switches_and_lists_have_defaults() {
        let command = applied("quiet = true\n[run]\nstop = [\"a\", \"b\"]").unwrap();
        let matches = command.clone().get_matches_from(["program", "run"]);
        let (_, run) = matches.subcommand().unwrap();
        assert!(run.get_flag("quiet"));
        assert_eq!(run.get_many::<String>("stop").unwrap().collect::<Vec<_>>(), ["a", "b"]);
        let matches = command.get_matches_from(["program", "run", "--stop", "c"]);
        let (_, run) = matches.subcommand().unwrap();
        assert_eq!(run.get_many::<String>("stop").unwrap().collect::<Vec<_>>(), ["c"]);
    }

    #[test]
    fn wrong_keys_name_the_file_and_the_key() {
        for (file, words) in [
            ("memry = 5", "no option --memry"),
            ("[rum]\nmemory = 5", "[rum]"),
            ("[run]\nquiet.x = 5", "[quiet]"),
            ("[bench]\nmemory = 5", "`bench` has no option --memory"),
            ("memory = [5, 6]", "one value"),
            ("memory = 2026-01-01", "a text, a number"),
        ] {
            let error = format!("{:#}", applied(file).unwrap_err());
            assert!(error.contains(words) && error.contains("here/moeflux.toml"), "{error}");
        }
        let error = applied("memory = \"x\"").unwrap().try_get_matches_from(["program", "run"]);
        assert_eq!(error.unwrap_err().kind(), clap::error::ErrorKind::ValueValidation);
    }
}
