import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    environment: 'jsdom',
    include: ['src/**/__tests__/*.spec.ts'],
    restoreMocks: true,
    testTimeout: 30_000,
    hookTimeout: 30_000
  }
});
