//! A schema as a document: its parts, their places, and the targets of references.

use std::collections::{HashMap, HashSet};

use moeflux_base::GrammarError;
use serde_json::{Map, Value};

use super::uri;
use crate::grammar::form::invalid;

/// Keywords whose value is a schema.
const SINGLE: [&str; 12] = [
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contentSchema",
];

/// Keywords whose value is a list of schemas.
const LISTS: [&str; 5] = ["allOf", "anyOf", "items", "oneOf", "prefixItems"];

/// Keywords whose value is a map of names to schemas.
const MAPS: [&str; 6] =
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"];

/// Most parts of a schema.
const MAX_NODES: usize = 400_000;

/// Version of the specification. Later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SchemaDraft {
    Four,
    Six,
    Seven,
    V2019,
    V2020,
}

impl SchemaDraft {
    /// The draft that `$schema` names.
    fn named(uri: &str) -> Option<Self> {
        let uri = uri.trim_end_matches('#');
        let name = uri.strip_prefix("http://").or_else(|| uri.strip_prefix("https://"))?;
        Some(match name {
            "json-schema.org/draft/2020-12/schema" | "json-schema.org/schema" => Self::V2020,
            "json-schema.org/draft/2019-09/schema" => Self::V2019,
            "json-schema.org/draft-07/schema" => Self::Seven,
            "json-schema.org/draft-06/schema" => Self::Six,
            "json-schema.org/draft-04/schema" => Self::Four,
            _ => return None,
        })
    }
}

/// Index of a part in its document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct NodeId(u32);

/// Kind of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum NodeKind {
    Schema,
    /// A value that equals this one.
    Constant,
}

/// A part of the document.
pub(super) struct SchemaNode<'a> {
    pub(super) value: &'a Value,
    pub(super) kind: NodeKind,
    parent: Option<NodeId>,
    /// Place in the parent, such as `properties.name`.
    step: String,
    /// The same as names and indices.
    entry: Vec<String>,
    resource: usize,
}

/// A part with a base of references: the document, or a schema with an `$id`.
struct SchemaResource {
    uri: String,
    root: NodeId,
    draft: SchemaDraft,
    anchors: HashMap<String, NodeId>,
}

/// A whole schema.
pub(super) struct SchemaDocument<'a> {
    nodes: Vec<SchemaNode<'a>>,
    by_address: HashMap<(usize, NodeKind), NodeId>,
    resources: Vec<SchemaResource>,
    /// Names of `$dynamicAnchor`, and how many parts have each.
    dynamic: HashMap<String, usize>,
    /// Whether a part beside the root has `$recursiveAnchor`.
    is_recursive: bool,
}

impl<'a> SchemaDocument<'a> {
    /// Reads the parts of a schema.
    ///
    /// # Errors
    /// The schema names an unknown dialect, or has too many parts.
    pub(super) fn new(root: &'a Value) -> Result<Self, GrammarError> {
        let mut document = Self {
            nodes: Vec::new(),
            by_address: HashMap::new(),
            resources: Vec::new(),
            dynamic: HashMap::new(),
            is_recursive: false,
        };
        let root = SchemaNode {
            value: root,
            kind: NodeKind::Schema,
            parent: None,
            step: String::new(),
            entry: Vec::new(),
            resource: 0,
        };
        document.read(root)?;
        Ok(document)
    }

    pub(super) fn root(&self) -> NodeId {
        NodeId(0)
    }

    pub(super) fn node(&self, id: NodeId) -> &SchemaNode<'a> {
        &self.nodes[id.0 as usize]
    }

    /// The keywords of a part; `None` if it is true or false.
    pub(super) fn keywords(&self, id: NodeId) -> Option<&'a Map<String, Value>> {
        self.node(id).value.as_object()
    }

    pub(super) fn draft(&self, id: NodeId) -> SchemaDraft {
        self.resources[self.node(id).resource].draft
    }

    /// Path of a part, or of one of its keywords.
    pub(super) fn path(&self, id: NodeId, keyword: &str) -> String {
        let mut steps = vec![keyword];
        let mut next = Some(id);
        while let Some(id) = next {
            let node = self.node(id);
            steps.push(&node.step);
            next = node.parent;
        }
        steps.retain(|step| !step.is_empty());
        steps.reverse();
        steps.join(".")
    }

    /// Parts of the schema, in the order of the document.
    pub(super) fn schemas(&self) -> impl Iterator<Item = NodeId> {
        (0..u32::try_from(self.nodes.len()).unwrap_or(u32::MAX)).map(NodeId)
    }

    /// Names and indices of a part, from the root.
    pub(super) fn steps(&self, id: NodeId) -> Vec<String> {
        let node = self.node(id);
        let mut steps = node.parent.map(|parent| self.steps(parent)).unwrap_or_default();
        steps.extend(node.entry.iter().cloned());
        steps
    }

    /// The part at a path of names and indices from the root.
    pub(super) fn find(&self, steps: &[String]) -> Option<NodeId> {
        let mut value = self.node(self.root()).value;
        for step in steps {
            value = entry(value, step)?;
        }
        self.by_address.get(&(address(value), NodeKind::Schema)).copied()
    }

    /// The part that a keyword of a part holds.
    pub(super) fn child(&mut self, parent: NodeId, step: &str, value: &'a Value) -> NodeId {
        self.part(parent, step, value, NodeKind::Schema)
    }

    /// A constant in the value of a keyword.
    pub(super) fn constant(&mut self, parent: NodeId, step: &str, value: &'a Value) -> NodeId {
        self.part(parent, step, value, NodeKind::Constant)
    }

    fn part(&mut self, parent: NodeId, step: &str, value: &'a Value, kind: NodeKind) -> NodeId {
        if let Some(id) = self.by_address.get(&(address(value), kind)) {
            return *id;
        }
        let resource = self.node(parent).resource;
        let (parent, entry) = (Some(parent), vec![step.to_owned()]);
        self.push(SchemaNode { value, kind, parent, step: step.to_owned(), entry, resource })
    }

    fn push(&mut self, node: SchemaNode<'a>) -> NodeId {
        let id = NodeId(u32::try_from(self.nodes.len()).unwrap_or(u32::MAX));
        self.by_address.insert((address(node.value), node.kind), id);
        self.nodes.push(node);
        id
    }

    /// Adds a part and those below it.
    fn read(&mut self, root: SchemaNode<'a>) -> Result<(), GrammarError> {
        let mut rest = vec![root];
        while let Some(node) = rest.pop() {
            if self.nodes.len() >= MAX_NODES {
                return Err(invalid("", format!("the schema has more than {MAX_NODES} parts")));
            }
            let value = node.value;
            let id = self.push(node);
            let Some(map) = value.as_object() else {
                if self.resources.is_empty() {
                    self.add_resource(id, String::new(), None)?;
                }
                continue;
            };
            self.identify(id, map)?;
            let (resource, kind) = (self.node(id).resource, NodeKind::Schema);
            let children = parts(map).into_iter().map(|SchemaPart { step, entry, value }| {
                SchemaNode { value, kind, parent: Some(id), step, entry, resource }
            });
            rest.extend(children.rev());
        }
        Ok(())
    }

    /// Reads `$schema`, `$id` and the anchors of a part.
    fn identify(&mut self, id: NodeId, map: &'a Map<String, Value>) -> Result<(), GrammarError> {
        let text = |keyword: &str| map.get(keyword).and_then(Value::as_str);
        let is_root = self.resources.is_empty();
        let named = match text("$schema") {
            Some(uri) => Some(SchemaDraft::named(uri).ok_or_else(|| {
                let problem = format!("{uri:?} is not one of the drafts 4 to 2020-12");
                invalid(self.path(id, "$schema"), problem)
            })?),
            None => None,
        };
        let outer = self.resources.get(self.node(id).resource);
        let draft = named.or(outer.map(|outer| outer.draft)).unwrap_or(SchemaDraft::V2020);
        let keyword = if draft == SchemaDraft::Four { "id" } else { "$id" };
        // Up to draft 7, nothing counts beside a reference.
        let is_reference = draft <= SchemaDraft::Seven && map.contains_key("$ref");
        let own = text(keyword).filter(|_| !is_reference);
        let base = outer.map(|outer| outer.uri.clone()).unwrap_or_default();
        match own {
            Some(anchor) if anchor.starts_with('#') && draft <= SchemaDraft::Seven => {
                if is_root {
                    self.add_resource(id, base, named)?;
                }
                self.add_anchor(id, &anchor[1..]);
            }
            Some(own) => {
                let uri = uri::join(&base, own.split('#').next().unwrap_or_default());
                self.add_resource(id, uri, Some(draft))?;
            }
            None if is_root => self.add_resource(id, base, named)?,
            None => {}
        }
        for keyword in ["$anchor", "$dynamicAnchor"] {
            if let Some(name) = text(keyword) {
                self.add_anchor(id, name);
                if keyword == "$dynamicAnchor" {
                    *self.dynamic.entry(name.to_owned()).or_default() += 1;
                }
            }
        }
        let is_recursive = map.get("$recursiveAnchor") == Some(&Value::Bool(true));
        self.is_recursive |= is_recursive && !is_root;
        Ok(())
    }

    fn add_resource(
        &mut self,
        root: NodeId,
        uri: String,
        draft: Option<SchemaDraft>,
    ) -> Result<(), GrammarError> {
        let draft = draft.unwrap_or(SchemaDraft::V2020);
        self.nodes[root.0 as usize].resource = self.resources.len();
        self.resources.push(SchemaResource { uri, root, draft, anchors: HashMap::new() });
        Ok(())
    }

    fn add_anchor(&mut self, id: NodeId, name: &str) {
        let resource = self.node(id).resource;
        self.resources[resource].anchors.entry(name.to_owned()).or_insert(id);
    }

    /// The part to which `$ref` of a part refers.
    ///
    /// # Errors
    /// There is none in the document.
    pub(super) fn target(&mut self, id: NodeId, reference: &str) -> Result<NodeId, String> {
        let (uri, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let own = self.node(id).resource;
        let resource = match uri {
            "" => own,
            uri => {
                let uri = uri::join(&self.resources[own].uri, uri);
                let found = self.resources.iter().position(|resource| resource.uri == uri);
                found.ok_or_else(|| format!("{reference:?} refers to another document"))?
            }
        };
        let none = || format!("{reference:?} refers to no part of the schema");
        let fragment = uri::decoded(fragment);
        let root = self.resources[resource].root;
        if fragment.is_empty() || fragment == "/" {
            return Ok(root);
        }
        let Some(pointer) = fragment.strip_prefix('/') else {
            return self.resources[resource].anchors.get(&fragment).copied().ok_or_else(none);
        };
        let mut target = root;
        for step in pointer.split('/') {
            let step = step.replace("~1", "/").replace("~0", "~");
            let value = entry(self.node(target).value, &step).ok_or_else(none)?;
            target = self.child(target, &step, value);
        }
        match self.node(target).value {
            Value::Object(_) | Value::Bool(_) => Ok(target),
            _ => Err(format!("{reference:?} refers to no schema")),
        }
    }

    /// The part to which `$dynamicRef` refers.
    ///
    /// # Errors
    /// It depends on the references that lead to it.
    pub(super) fn dynamic_target(&mut self, id: NodeId, text: &str) -> Result<NodeId, String> {
        let target = self.target(id, text)?;
        let name = text.split_once('#').map_or("", |(_, name)| name);
        let anchor = self.keywords(target).and_then(|map| map.get("$dynamicAnchor"));
        let is_dynamic = anchor.and_then(Value::as_str) == Some(name);
        match is_dynamic && self.dynamic.get(name).is_some_and(|count| *count > 1) {
            true => Err(format!("{text:?} has several targets")),
            false => Ok(target),
        }
    }

    /// The part to which `$recursiveRef` refers.
    ///
    /// # Errors
    /// It depends on the references that lead to it.
    pub(super) fn recursive_target(&mut self, id: NodeId) -> Result<NodeId, String> {
        match self.is_recursive {
            true => Err("it has several targets".to_owned()),
            false => Ok(self.resources[self.node(id).resource].root),
        }
    }

    /// Parts to which several references lead, or one from below.
    pub(super) fn shared(&mut self) -> HashSet<NodeId> {
        let (mut seen, mut shared) = (HashSet::new(), HashSet::new());
        for index in 0..self.nodes.len() {
            let id = NodeId(u32::try_from(index).unwrap_or(u32::MAX));
            let reference = self.keywords(id).and_then(|map| map.get("$ref"));
            let Some(text) = reference.and_then(Value::as_str) else { continue };
            let Ok(target) = self.target(id, text) else { continue };
            if !seen.insert(target) || self.is_inside(id, target) {
                shared.insert(target);
            }
        }
        shared
    }

    fn is_inside(&self, id: NodeId, outer: NodeId) -> bool {
        let mut next = Some(id);
        while let Some(id) = next {
            if id == outer {
                return true;
            }
            next = self.node(id).parent;
        }
        false
    }
}

/// A schema in a schema.
pub(in super::super) struct SchemaPart<'a> {
    /// Its place, such as `properties.name`.
    pub(in super::super) step: String,
    /// The same as names and indices.
    pub(in super::super) entry: Vec<String>,
    pub(in super::super) value: &'a Value,
}

/// The schemas in a schema.
pub(in super::super) fn parts(map: &Map<String, Value>) -> Vec<SchemaPart<'_>> {
    let mut all = Vec::new();
    for (keyword, value) in map {
        let keyword = keyword.as_str();
        let mut add = |step: String, inner: Option<String>, value| {
            let entry = std::iter::once(keyword.to_owned()).chain(inner).collect();
            all.push(SchemaPart { step, entry, value });
        };
        match value {
            Value::Array(list) if LISTS.contains(&keyword) => {
                for (index, part) in list.iter().enumerate() {
                    add(format!("{keyword}[{index}]"), Some(index.to_string()), part);
                }
            }
            Value::Object(parts) if MAPS.contains(&keyword) => {
                for (name, part) in parts.iter().filter(|(_, part)| !part.is_array()) {
                    add(format!("{keyword}.{name}"), Some(name.clone()), part);
                }
            }
            Value::Object(_) | Value::Bool(_) if SINGLE.contains(&keyword) => {
                add(keyword.to_owned(), None, value);
            }
            _ => {}
        }
    }
    all
}

/// The value at a path of names and indices.
pub(in super::super) fn value_at<'a>(
    root: &'a mut Value,
    steps: &[String],
) -> Option<&'a mut Value> {
    let mut value = root;
    for step in steps {
        value = match value {
            Value::Object(map) => map.get_mut(step)?,
            Value::Array(list) => list.get_mut(step.parse::<usize>().ok()?)?,
            _ => return None,
        };
    }
    Some(value)
}

/// Identity of a value while its document lives.
fn address(value: &Value) -> usize {
    std::ptr::from_ref(value) as usize
}

/// An entry of an object or an array.
pub(super) fn entry<'a>(value: &'a Value, step: &str) -> Option<&'a Value> {
    match value {
        Value::Object(map) => map.get(step),
        Value::Array(list) => list.get(step.parse::<usize>().ok()?),
        _ => None,
    }
}
