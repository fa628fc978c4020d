import js from '@eslint/js';
import tseslint from 'typescript-eslint';

const asText =
  'Text of models, tasks and people is shown as text: set textContent or append nodes.';

export default tseslint.config(
  { ignores: ['node_modules/', '.yarn/'] },
  js.configs.recommended,
  {
    files: ['src/**/*.ts'],
    extends: [tseslint.configs.strictTypeChecked],
    languageOptions: { parserOptions: { projectService: true } },
    rules: {
      '@typescript-eslint/no-non-null-assertion': 'off',
      '@typescript-eslint/restrict-template-expressions': ['error', { allowNumber: true }],
      '@typescript-eslint/no-confusing-void-expression': ['error', { ignoreArrowShorthand: true }],
      '@typescript-eslint/no-unused-vars': ['error', { argsIgnorePattern: '^_' }],
      'no-restricted-properties': [
        'error',
        ...[
          'innerHTML',
          'outerHTML',
          'insertAdjacentHTML',
          'setHTMLUnsafe',
          'createContextualFragment',
          'srcdoc'
        ].map(property => ({ property, message: asText })),
        ...['write', 'writeln'].map(property => ({
          object: 'document',
          property,
          message: asText
        }))
      ],
      'no-eval': 'error',
      'no-implied-eval': 'off',
      '@typescript-eslint/no-implied-eval': 'error'
    }
  },
  {
    files: ['*.mjs'],
    languageOptions: { globals: { process: 'readonly', URL: 'readonly' } }
  }
);
