//! Rewrites the text of documents without what is masked.

use jiter::{Jiter, Peek};

use super::canonical::canonical;
use super::{Action, FieldMasks, MAX_DEPTH, Node};
use crate::document::malformed::{Malformed, Problem, Result};
use crate::document::reader::MAX_DOCUMENT_BYTES;
use crate::document::sightings::Sightings;
use crate::document::skip::{raw_key, skip, unescaped, whole_pairs};

impl FieldMasks {
    /// Writes a document without what is masked; other bytes stay as they are.
    pub(in crate::document) fn mask(
        &self,
        document: &[u8],
        out: &mut Vec<u8>,
        seen: &mut Sightings,
    ) -> Result<()> {
        out.clear();
        if let Err(error) = std::str::from_utf8(document) {
            return Err(Malformed::new(Problem::NotUtf8, error.valid_up_to()));
        }
        let whole = whole_pairs(document);
        let json = Jiter::new(&whole);
        let mut rewriter = Rewriter { masks: self, json, document, copied: 0, out, seen };
        let peek = rewriter.json.peek()?;
        rewriter.value(&self.inner.root, peek, 0)?;
        rewriter.json.finish()?;
        rewriter.copy(document.len())?;
        rewriter.seen.documents += 1;
        Ok(())
    }
}

/// Copies a document from edit to edit.
struct Rewriter<'j, 'm> {
    masks: &'m FieldMasks,
    json: Jiter<'j>,
    document: &'j [u8],
    /// Up to where the document was copied, or left out.
    copied: usize,
    out: &'m mut Vec<u8>,
    /// The masked fields that there were.
    seen: &'m mut Sightings,
}

/// What was kept of the items of an object or an array.
#[derive(Default)]
struct Kept {
    /// Where the last one ends.
    end: Option<usize>,
    /// Whether items were left out before the first one, so that the comma before it has to go.
    is_after_gap: bool,
}

impl Rewriter<'_, '_> {
    /// Reads a value, of whose members some may be masked.
    fn value(&mut self, node: &Node, peek: Peek, depth: usize) -> Result<()> {
        if depth > MAX_DEPTH {
            return Err(Malformed::at(Problem::TooDeep, &self.json));
        }
        match peek {
            Peek::Object => self.object(node, depth),
            Peek::Array => self.array(node, depth),
            _ => Ok(self.json.known_skip(peek)?),
        }
    }

    fn object(&mut self, node: &Node, depth: usize) -> Result<()> {
        let mut kept = Kept::default();
        let mut next = raw_key(&mut self.json, self.document, true)?;
        while let Some((start, raw)) = next {
            self.begin(&mut kept, start);
            let name = unescaped(raw);
            let member = name.and_then(|name| node.members.get(name.as_ref()));
            let peek = self.json.peek()?;
            let is_dropped = match member {
                Some(member) => self.member(member, peek, depth)?,
                None => {
                    skip(&mut self.json, peek)?;
                    false
                }
            };
            self.end(&mut kept, start, is_dropped)?;
            next = raw_key(&mut self.json, self.document, false)?;
        }
        Ok(())
    }

    /// Reads the value of a member; whether the member is dropped.
    fn member(&mut self, node: &Node, peek: Peek, depth: usize) -> Result<bool> {
        if node.is_masked() {
            self.seen.see(node.index);
        }
        match (node.action, node.of_elements) {
            (None, None) => self.value(node, peek, depth + 1).map(|()| false),
            (None, Some(action)) if peek == Peek::Array => self.elements(action).map(|()| false),
            (Some(action), _) | (None, Some(action)) => self.masked(action, peek),
        }
    }

    /// Reads a value that is masked; whether it is dropped.
    fn masked(&mut self, action: Action, peek: Peek) -> Result<bool> {
        let start = self.json.current_index();
        skip(&mut self.json, peek)?;
        // A null says that there is no value.
        if action == Action::Drop || peek == Peek::Null {
            return Ok(action == Action::Drop);
        }
        let end = self.json.current_index();
        let text = self.document.get(start..end).unwrap_or_default();
        let hash = self.masks.hash(
            &canonical(text)
                .map_err(|malformed| Malformed { at: start + malformed.at, ..malformed })?,
        );
        self.copy(start)?;
        self.out.extend_from_slice(&[b"\"", hash.as_bytes(), b"\""].concat());
        self.copied = end;
        Ok(false)
    }

    /// Reads an array on the way to a field.
    fn array(&mut self, node: &Node, depth: usize) -> Result<()> {
        let mut next = self.json.known_array()?;
        while let Some(peek) = next {
            self.value(node, peek, depth + 1)?;
            next = self.json.array_step()?;
        }
        Ok(())
    }

    /// Reads an array whose elements are masked.
    fn elements(&mut self, action: Action) -> Result<()> {
        let mut kept = Kept::default();
        let mut next = self.json.known_array()?;
        while let Some(peek) = next {
            let start = self.json.current_index();
            self.begin(&mut kept, start);
            let is_dropped = self.masked(action, peek)?;
            self.end(&mut kept, start, is_dropped)?;
            next = self.json.array_step()?;
        }
        Ok(())
    }

    /// Begins an item.
    fn begin(&mut self, kept: &mut Kept, start: usize) {
        if std::mem::take(&mut kept.is_after_gap) {
            self.copied = start;
        }
    }

    /// Ends an item, which is left out with a comma if it is dropped.
    fn end(&mut self, kept: &mut Kept, start: usize, is_dropped: bool) -> Result<()> {
        let end = self.json.current_index();
        if !is_dropped {
            kept.end = Some(end);
            return Ok(());
        }
        self.copy(kept.end.unwrap_or(start))?;
        self.copied = end;
        kept.is_after_gap = kept.end.is_none();
        Ok(())
    }

    /// Copies the document up to `end`, if that is not behind.
    fn copy(&mut self, end: usize) -> Result<()> {
        let Some(text) = self.document.get(self.copied..end) else { return Ok(()) };
        if self.out.len() + text.len() > MAX_DOCUMENT_BYTES {
            return Err(Malformed::new(Problem::TooLarge, end));
        }
        self.out.extend_from_slice(text);
        self.copied = end;
        Ok(())
    }
}
