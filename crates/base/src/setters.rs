//! Setters of option structs, which other crates cannot build from a literal.

/// Chained setters, one per field: `Options::default().field(value)`. A setter of an optional field
/// takes a value or an option.
#[doc(hidden)]
#[macro_export]
macro_rules! setters {
    ($options:ty { $($field:ident: $value:ty),+ $(,)? }) => {
        impl $options {
            $(
                #[doc = concat!("Sets `", stringify!($field), "`.")]
                #[must_use]
                pub fn $field(mut self, $field: $value) -> Self {
                    self.$field = $field.into();
                    self
                }
            )+
        }
    };
}
